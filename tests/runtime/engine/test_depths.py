"""Depth 0 is the oracle (law 9): tokens, reasons and log-probabilities at any depth equal the serial engine's."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from runtime.engine import Engine
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.result_reader import StepLogprobs
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, Request
from tests.runtime.engine import rig as rigs
from tests.runtime.engine.conftest import over_models
from tests.runtime.engine.rig import VOCABULARY, request, rig, run
from tests.runtime.engine.serial_answers import serial_answers
from tests.runtime.execute.sampling.sampling_fields import SamplingFields

pytestmark = pytest.mark.usefixtures("every_model")
DEPTHS = (1, 2, 4)


def mixture(seed: int, count: int = 14) -> list[Request]:
    """Prompts of all lengths, some with a common beginning; greedy, random, filtered, penalised; some stop early."""
    draw = random.Random(seed)
    stem = [draw.randrange(VOCABULARY) for _ in range(30)]
    requests = []
    for request_id in range(count):
        prompt = stem[: draw.choice((0, 0, 17, 30))] + [
            draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 50))
        ]
        sampling: SamplingFields = {"max_tokens": draw.randrange(1, 25)}
        if draw.random() < 0.6:
            sampling |= {"temperature": draw.choice((0.5, 1.0, 1.7)), "top_p": draw.choice((1.0, 0.8))}
        if draw.random() < 0.3:
            sampling |= {"top_k": 20, "min_p": 0.01}
        if draw.random() < 0.3:
            sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}
        if draw.random() < 0.3:
            sampling |= {"min_tokens": min(3, sampling["max_tokens"]), "logprobs": 3}
        stops = tuple(draw.sample(range(VOCABULARY), draw.choice((0, 8, 14))))
        requests.append(request(request_id, prompt, stops=stops, **sampling))
    return requests


Entry = tuple[float, int, tuple[int, ...], tuple[float, ...]]  # chosen, rank, top ids, top values


class Logprobs:
    """Collects the log-probabilities of requests that asked, row by row."""

    def __init__(self, asked: set[int]) -> None:
        self.asked = asked
        self.by_request: dict[int, list[Entry]] = {}

    def __call__(self, output: StepOutput) -> None:
        if not isinstance(output.logprobs, StepLogprobs):
            return
        for row, (request_id, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
            if request_id in self.asked and count:
                values = output.logprobs
                entry = (
                    float(values.chosen_BW[row, 0]),
                    int(values.rank_BW[row, 0]),
                    tuple(values.top_ids_BWN[row, 0, :3].tolist()),
                    tuple(np.round(values.top_BWN[row, 0, :3], 5).tolist()),
                )
                self.by_request.setdefault(request_id, []).append(entry)


def outcome(finished: dict[int, Finished]) -> dict[int, tuple[tuple[int, ...], FinishReason]]:
    return {request_id: (ended.token_ids, ended.reason) for request_id, ended in finished.items()}


@cache
def serial_mixture(seed: int, model: str) -> tuple[dict[int, Finished], Logprobs]:
    """What depth 0 makes of it over the rig's ``model``; every depth is compared with that."""
    requests = mixture(seed)
    logprobs = Logprobs({r.request_id for r in requests if r.sampling.logprobs is not None})
    with rig(depth=0) as engine:
        serial = run(engine, requests, watch=logprobs)
        assert engine.counters["chained_steps"] == 0
    return serial, logprobs


@pytest.mark.parametrize(
    ("every_model", "depth", "seed"), over_models(DEPTHS, range(3), at_once=0, turned=12), indirect=["every_model"]
)
def test_a_mixture_of_everything(depth: int, seed: int) -> None:
    requests = mixture(seed)
    serial, serial_logprobs = serial_mixture(seed, str(rigs.TINY))
    asked = {r.request_id for r in requests if r.sampling.logprobs is not None}
    deep_logprobs = Logprobs(asked)
    with rig(depth=depth) as engine:
        deep = run(engine, requests, watch=deep_logprobs)
        counters = engine.counters
        assert counters["chain_breaks{start}"] == 1
        assert counters["chained_steps"] == counters["steps"] - 1
    assert outcome(deep) == outcome(serial)
    assert deep_logprobs.by_request.keys() == serial_logprobs.by_request.keys() == asked
    for request_id in asked:
        mine, oracle = deep_logprobs.by_request[request_id], serial_logprobs.by_request[request_id]
        assert [e[1:3] for e in mine] == [e[1:3] for e in oracle]
        assert np.allclose([e[0] for e in mine], [e[0] for e in oracle], atol=1e-5)


@pytest.mark.parametrize(("every_model", "depth"), over_models(DEPTHS, at_once=0, turned=4), indirect=["every_model"])
def test_memory_pressure_evicts_and_recomputes(depth: int) -> None:
    requests = [request(i, range(i, i + 20), max_tokens=40, stops=(), temperature=0.9 * (i % 2)) for i in range(6)]
    roomy = serial_answers(requests, blocks=200)
    with rig(depth=depth, blocks=20) as engine:
        tight = run(engine, requests)
        assert engine.counters["evictions"] > 0
    assert outcome(tight) == roomy


@pytest.mark.parametrize(("every_model", "depth"), over_models(DEPTHS, at_once=0, turned=2), indirect=["every_model"])
def test_cancelled_and_paused_requests_leave_the_others_alone(depth: int) -> None:
    requests = mixture(7)
    serial = serial_answers(requests)

    def act(engine: Engine, turn: int) -> None:
        if turn == 3:
            engine.cancel(0)
            engine.pause(1)
        if turn == 6:
            engine.cancel(2)
            engine.cancel(2)
            engine.cancel(999)
        if turn == 15:
            engine.resume(1)

    with rig(depth=depth) as engine:
        deep = run(engine, requests, act)
    for request_id, ended in deep.items():
        if ended.reason is FinishReason.CANCELLED:
            assert request_id in (0, 2)
            assert ended.token_ids == serial[request_id][0][: len(ended.token_ids)]
        else:
            assert (ended.token_ids, ended.reason) == serial[request_id]


def test_slow_and_uneven_streams_change_nothing() -> None:
    requests = mixture(4, count=8)
    with rig(depth=0) as engine:
        serial = run(engine, requests)
    for seed in range(2):
        with rig(depth=2, device=TwinDevice(jitter_s=0.002, seed=seed)) as engine:
            assert outcome(run(engine, requests)) == outcome(serial)


def test_the_same_tokens_alone_and_together() -> None:
    """A draw depends on (seed, position, token) alone: neither on the batch nor on when a request was admitted."""
    requests = mixture(5, count=6)
    with rig() as engine:
        together = run(engine, requests)
    for one in requests:
        with rig() as engine:
            assert outcome(run(engine, [one])) == {one.request_id: outcome(together)[one.request_id]}


def test_a_steady_step_moves_nothing_to_the_device() -> None:
    with rig(block_size=32) as engine:
        for i in range(4):
            engine.add(request(i, (5, 6, 7, 8 + i), max_tokens=20, stops=()))
        for _ in range(8):
            engine.step()
        before = engine.counters["host_to_device_bytes"]
        for _ in range(8):
            engine.step()
        assert engine.counters["host_to_device_bytes"] == before
