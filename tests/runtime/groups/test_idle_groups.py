"""Groups over the real control plane that have nothing to do: what came last is taken, and rank 0 waits."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.control.connect import open_control
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.states import Limits
from parallel.layers.experts import ExpertSplit
from parallel.topology import Topology
from runtime.frontend.client import EngineClient, PromptRequest
from runtime.groups.load_balancer import LoadBalancer
from runtime.schedule.request import SamplingParams
from tests.parallel.control.ranks import IDENTITY, short_folder
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.group_rigs import Meeting, MetExchange
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.test_experts import EXPERTS

LIMITS = Limits(deadline=60.0, resend=0.5, divergence=1.0, spin=0.0, start=60.0)
PROMPTS = (tuple(range(5, 9)), tuple(range(7, 11)))
TURNS = 60  # for which rank 0 finds nothing to do before it is looked at
HOW: dict[str, Any] = {
    "rows": 8,
    "buckets": (1, 2, 4, 8),
    "shape": EXPERTS | {"decoder_sparse_step": 1},
    "dtype": torch.float64,
}


def stop_of_the_second() -> int:
    """A token that it draws late enough that the first has ended."""
    with rig(depth=0, kernels=exact_kernels(tables=True), **HOW) as engine:
        answers = run(engine, [request(i, prompt, max_tokens=20, stops=()) for i, prompt in enumerate(PROMPTS)])
    tokens = answers[1].token_ids
    return next(token for at, token in enumerate(tokens) if at >= 9 and token not in tokens[:at])


def no_stop() -> None:
    pass


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.long), 2])
def test_an_end_of_another_group_leaves_nothing_that_keeps_rank_0_awake(depth: int) -> None:
    """Its ghost rows land when its end has been told: what they say comes behind the last turn."""
    stop, meeting = stop_of_the_second(), Meeting(2)
    failures: list[BaseException] = []

    def rank(index: int, folder: Path) -> None:
        topology, identity = Topology(index, 2, index, 2), replace(IDENTITY, horizon=0)
        try:
            with open_control(topology, identity, folder, LIMITS, groups=2) as plane:
                experts = ExpertSplit(whole=True, exchange=MetExchange(meeting, index))
                place: dict[str, Any] = {"control": plane, "groups": plane, "assignment": LoadBalancer(index, 2)}
                with rig(depth=depth, kernels=exact_kernels(tables=True), experts=experts, **HOW, **place) as engine:
                    if index:
                        engine.follow()
                        engine.stop = no_stop  # type: ignore[method-assign]  # the rig's: rank 0 has stopped both
                        return
                    client = EngineClient(engine, text=False)
                    ends: tuple[dict[str, Any], ...] = {"max_tokens": 3}, {"max_tokens": 20, "stop_token_ids": (stop,)}
                    for prompt, end in zip(PROMPTS, ends, strict=True):
                        client.submit(PromptRequest(prompt, SamplingParams(temperature=0.0, ignore_eos=True, **end)))
                    idle = 0
                    while idle < TURNS:
                        if client.live:
                            client.turn()
                        elif engine.has_work:
                            engine.step()
                        else:
                            idle += 1
                            client.wait(threading.Event().wait, 0.02)
                    assert isinstance(plane, LeaderPlane)
                    assert not plane.machine.inbox.has_messages()
                    assert not engine.has_work
        except BaseException as error:
            failures.append(error)
            meeting.abort()

    with short_folder() as folder:
        threads = [threading.Thread(target=rank, args=(index, folder)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
