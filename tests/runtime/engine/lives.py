"""One life of an engine, from the first request to the last, and everything a test may want to know of it afterwards.

The model is computed exactly (exact_kernels.py), so lives are compared bit for bit. Every life ends with its books in
order: no block, slot or epoch is left over.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any, Unpack

import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.result_reader import StepLogprobs
from runtime.observe.observer import InFlight, StepObserver
from runtime.schedule.plan import Finished, StepOutput, StepPlan
from runtime.schedule.request import FinishReason, Request
from tests.runtime.engine import rig as rigs
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.prompt_ranks import Scores
from tests.runtime.engine.rig import VOCABULARY, request, rig, run
from tests.runtime.execute.sampling.sampling_fields import SamplingFields

Act = Callable[[Engine, int], None]  # called before each turn, with its number
Entry = tuple[float, int, tuple[int, ...], tuple[float, ...]]  # chosen, rank, top ids, top values


@dataclass
class Life:
    """``plans``: step by step, None for a void one; ``specs``: how the others were launched. ``gained``: after each
    turn, every request's landed tokens so far. ``rounds``: what each request gained in its windows, one after the
    other. ``asked``: how many likely tokens beside each of its own a request wants to know. ``states``: of each request
    that ended, its row of every bank of recurrent state when its slot became free.
    """

    asked: dict[int, int] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    logprobs: dict[int, list[Entry]] = field(default_factory=dict)
    scores: Scores = field(default_factory=Scores)
    counters: dict[str, int | float] = field(default_factory=dict)
    plans: list[StepPlan | None] = field(default_factory=list)
    specs: list[LaunchSpec] = field(default_factory=list)
    gained: list[dict[int, int]] = field(default_factory=list)
    rounds: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def answers(self) -> dict[int, tuple[tuple[int, ...], FinishReason]]:
        return {i: (ended.token_ids, ended.reason) for i, ended in self.finished.items()}

    @property
    def real_plans(self) -> list[StepPlan]:
        return [plan for plan in self.plans if plan is not None]

    def watch(self, output: StepOutput) -> None:
        """To be called with every output."""
        self.scores(output)
        self.finished |= {ended.request_id: ended for ended in output.finished}
        sums = dict(self.gained[-1]) if self.gained else {}
        for row, (request_id, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
            if request_id < 0 or not count:
                continue
            sums[request_id] = sums.get(request_id, 0) + count
            if output.width > 1:
                self.rounds.setdefault(request_id, []).append(count)
            if request_id in self.asked:
                assert isinstance(output.logprobs, StepLogprobs)
                for column in range(count):
                    entry = _entry(output.logprobs, row, column, self.asked[request_id])
                    self.logprobs.setdefault(request_id, []).append(entry)
        self.gained.append(sums)


class Launches(StepObserver):
    """Keeps every plan that landed, and how it was launched: as the value that was planned, which no copy replaces.

    Ranks in threads (tensor_ranks.py) share one.
    """

    def __init__(self, life: Life) -> None:
        super().__init__()
        self._life = life

    def landed(self, flight: InFlight) -> None:
        self._life.plans.append(flight.plan)
        if (launch := flight.launch) is not None:
            assert flight.plan is None or flight.plan is launch.plan, "a group without a plan launches one without rows"
            self._life.specs.append(launch)
        super().landed(flight)


class Slots:
    """After each turn: no slot is free that a step in flight may touch, and none is kept for longer than that."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._plans = 0  # of the life's, looked at so far
        self._owners: dict[int, int] = {}  # slot -> the request that has it, or had it last

    def check(self, engine: Engine) -> None:
        slots = engine.scheduler.slots
        free = set(slots._free)
        in_flight = {slot for flight in engine._in_flight.values() if flight.plan for slot in flight.plan.slots}
        held = {one.slot for one in engine.scheduler.ledger.sequences.values() if one.slot}
        assert not free & in_flight, "a slot is free while a step in flight may touch it"
        assert set(range(1, slots.count + 1)) == free | in_flight | held, "a slot is kept after its last step landed"
        for plan in self._life.plans[self._plans :]:
            self._owners |= {write.slot: write.request_id for write in plan.slot_writes} if plan is not None else {}
        self._plans = len(self._life.plans)
        for slot in [slot for slot in self._owners if slot in free]:
            request_id, banks = self._owners.pop(slot), engine.executor.pool.banks
            if banks and request_id in self._life.finished:
                engine.executor.device.compute.synchronize()
                self._life.states[request_id] = [bank[:, slot].clone() for bank in banks]


def _entry(columns: StepLogprobs, row: int, column: int, top: int) -> Entry:
    at = row, column
    likely = tuple(columns.top_ids_BWN[at][:top].tolist()), tuple(columns.top_BWN[at][:top].tolist())
    return float(columns.chosen_BW[at]), int(columns.rank_BW[at]), *likely


def live(
    requests: list[Request],
    act: Act | None = None,
    *,
    depth: int,
    later: Mapping[int, list[Request]] | None = None,
    added: Iterable[Request] = (),
    over: Callable[..., AbstractContextManager[Engine]] | None = None,
    **limits: Any,
) -> Life:
    """Run ``requests`` to their end, with those that arrive ``later``, by turn, and those ``added`` by ``act``.
    ``limits`` are those of the rig, or of what gives an engine instead: ``over``.
    """
    life, arriving = Life(), dict(later or {})
    for one in chain(requests, *arriving.values(), added):
        if one.sampling.logprobs is not None:
            life.asked |= dict.fromkeys(one.answer_ids, one.sampling.logprobs)

    def turn_begins(engine: Engine, turn: int) -> None:
        for one in arriving.pop(turn, ()):
            engine.add(one)
        if act is not None:
            act(engine, turn)

    slots = Slots(life)
    exact: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64, "observe": Launches(life)}
    with (over or rig)(depth=depth, **(exact | limits)) as engine:

        def turn_ends(output: StepOutput) -> None:
            life.watch(output)
            slots.check(engine)

        run(engine, requests, turn_begins, turn_ends)
        assert not arriving, "everything was over before the last request arrived"
        engine.stop()
        life.counters = dict(engine.counters)
        if over is None:
            reasons = Counter(f"finished{{{ended.reason.label}}}" for ended in life.finished.values())
            counted = {name: n for name, n in life.counters.items() if name.startswith("finished{") and n}
            assert counted == reasons
        check_all_is_back(engine)
    return life


@cache
def _alone(requests: tuple[Request, ...], limits: tuple[tuple[str, Any], ...], model: str) -> Life:
    life = live(list(requests), depth=0, **dict(limits))
    for steps in (life.plans, life.specs, life.gained):
        steps.clear()  # thousands of objects, in which nobody looks for what must be equal
    return life


def oracle(requests: list[Request], **limits: Any) -> Life:
    """What the serial engine makes of them, with room for everybody. Bits depend on nothing else, so no limit of the
    life it is compared with needs repeating, but ``max_model_len`` where it ends a request.
    """
    life = _alone(tuple(requests), tuple(limits.items()), str(rigs.TINY))
    assert life.counters["chained_steps"] == 0
    return life


def ending(at: int, requests: list[Request]) -> list[Request]:
    """Those of ``requests`` whose token ``at`` (from 0) comes for the first time, which makes it their stop id."""
    alone = oracle(requests)
    found = []
    for one in requests:
        tokens = alone.finished[one.request_id].token_ids
        if tokens[at] not in tokens[:at]:
            found.append(replace(one, stop_token_ids=(tokens[at],)))
    return found


def check_all_is_back(engine: Engine) -> None:
    """Nothing is in flight, held or fenced, and each stay in a slot has ended exactly one epoch."""
    scheduler = engine.scheduler
    scheduler.check()
    assert (scheduler.unfinished, len(scheduler.chain)) == (0, 0)
    assert scheduler.pool.free_count == scheduler.config.blocks
    assert scheduler.pool.soon_free == 0
    assert all(pool.free_count == pool.room == pool.count for pool in scheduler.ledger.windows)
    assert scheduler.slots.free_count == scheduler.config.limits.slots
    assert scheduler.slots.fenced_count == 0
    assert sum(scheduler.slots.epochs) == scheduler.counters.admissions


def same(life: Life, serial: Life, *, but: Iterable[int] = ()) -> None:
    """The same answers and log-probabilities, to the last bit; ``but`` names the requests that were cut short."""
    cut = set(but)
    assert life.answers.keys() == serial.answers.keys()
    for request_id, (tokens, reason) in serial.answers.items():
        found, found_reason = life.answers[request_id]
        if request_id in cut:
            tokens, reason = tokens[: len(found)], found_reason
        assert (found, found_reason) == (tokens, reason), f"request {request_id}"
        assert life.logprobs.get(request_id, []) == serial.logprobs.get(request_id, [])[: len(found)]
        scores, expected = life.scores.by_request.get(request_id, {}), serial.scores.by_request.get(request_id, {})
        assert scores == (expected if request_id not in cut else {p: expected[p] for p in scores})


def unbroken(life: Life) -> None:
    """Every step but the very first was planned while another was in flight."""
    counters = life.counters
    assert {name: n for name, n in counters.items() if name.startswith("chain_breaks")} == {"chain_breaks{start}": 1}
    assert counters["chained_steps"] == counters["steps"] - 1


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCABULARY) for _ in range(length))


def people(
    count: int, *, length: int = 12, stops: tuple[int, ...] = (), **sampling: Unpack[SamplingFields]
) -> list[Request]:
    """Requests of different prompts that draw at random and report log-probabilities."""
    params: SamplingFields = {"temperature": 1.0, "max_tokens": 16, "logprobs": 2, **sampling}
    return [request(i, prompt(length, i), stops=stops, **params) for i in range(count)]
