"""The lifecycle of requests over tiny hybrid targets with proposers: what happens in a life, and what is written down.

Knows: the scenarios, the targets and their proposers, which slots may be free after a turn, and what state a slot holds
when it becomes free. Does not know: what a test compares with what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.execute.proposer import MakeProposer
from runtime.observe.observer import StepObserver
from runtime.schedule.plan import StepOutput, StepPlan
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.runtime.engine.exact_kernels import ExactKernels
from tests.runtime.engine.hybrid_grid import MODES
from tests.runtime.engine.lives import Life
from tests.runtime.engine.replay_proposer import window_roles
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.runtime.speculate.recorded import VOCABULARY, Drafter, OwnLayer
from tests.runtime.speculate.test_eagle3 import Head

WIDTH, BLOCK, ROWS = 4, 4, 4
TREE = 10  # tokens of a tree, of which a row gains WIDTH at most
GREEDY: dict[str, Any] = {"temperature": 0.0}
FILTERED: dict[str, Any] = {"temperature": 1.1, "top_k": 6, "top_p": 0.9, "min_p": 0.02}
SAMPLING = dict(zip(MODES, (GREEDY, FILTERED), strict=True))
_DONE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass
class Target:
    """A tiny model of a family, with its own MTP layer; drafters of other kinds are in ``folder``, too."""

    layers: int
    folder: Path
    own: OwnLayer

    @classmethod
    def of(cls, family: str, folder: Path) -> Target:
        if family == "nemotron-h":
            few = {"num_hidden_layers": 3, "hybrid_override_pattern": "M*E"}
            return cls(3, folder, OwnLayer(NEMOTRON | few, folder / "target"))
        few = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        return cls(2, folder, OwnLayer(FAMILIES[family] | few, folder / "target"))

    def proposer(self, name: str) -> MakeProposer:
        if name == "ngram":
            keys = {"num_speculative_tokens": WIDTH - 1, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
            return proposer_for(speculative_config({"method": "ngram", **keys}))
        if name == "eagle3":
            return Head(self.folder / "eagle3")
        if name == "mtp":
            return self.own
        if name == "tree":
            return Drafter("dflash", self.folder / "dflash", top_k=3, target_layers=self.layers)
        return Drafter(name, self.folder / name, target_layers=self.layers)

    @contextmanager
    def engine(
        self, proposer: str = "", depth: int = 0, *, kernels: Callable[[], ExactKernels] = ExactKernels, **limits: Any
    ) -> Iterator[Engine]:
        """Without a ``proposer``: the serial engine, a token a step. ``limits`` for "replay": its ``script``."""
        tree = TREE if proposer == "tree" else 0
        room = 12 + ROWS * ((tree or WIDTH) + WIDTH * depth) // BLOCK  # too little for four long answers
        how: dict[str, Any] = {
            "rows": ROWS,
            "blocks": room,
            "max_model_len": 32,
            "block_size": BLOCK,
            "max_prefill_tokens": 24,
            "observe": Seats(),
        }
        if proposer == "replay":
            how |= {"widths": (WIDTH,), "further_roles": window_roles((WIDTH,), limits.pop("script"), right=7)}
        elif proposer:
            rule = Speculation(WIDTH, mixed_percent=0 if tree else 100)  # no state takes in trees and chunks at once
            how |= {"proposer": self.proposer(proposer), "speculation": rule, "tree": tree}
        with rig(
            depth=depth, kernels=kernels(), dtype=torch.float64, folder=self.own.folder, **(how | limits)
        ) as engine:
            yield engine


Act = Callable[[Engine, int], None]


class Seats(StepObserver):
    """``owners``: by slot, the request that was seated there last, until it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[int, int] = {}

    def launch(self, plan: StepPlan | None, break_reason: str | None) -> None:
        if plan is not None:
            self.owners |= {write.slot: write.request_id for write in plan.slot_writes}
        super().launch(plan, break_reason)


@dataclass(frozen=True)
class Scenario:
    """``requests`` from the first turn on, others ``later`` by turn; ``cut``: those that are cancelled."""

    requests: list[Request]
    later: dict[int, list[Request]] = field(default_factory=dict)
    act: Act | None = None
    cut: frozenset[int] = frozenset()

    @property
    def everybody(self) -> list[Request]:
        return [*self.requests, *(one for arriving in self.later.values() for one in arriving)]


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """It repeats itself, so that a lookup finds something."""
    draw = torch.Generator().manual_seed(seed)
    few = torch.randint(VOCABULARY, (max(3, length // 2),), generator=draw).tolist()
    return tuple((few * length)[:length])


def people(
    count: int, mode: str, *, first: int = 0, lengths: tuple[int, ...] = (7, 3, 12, 5), **sampling: Any
) -> list[Request]:
    """Requests of the same prompt and mode have the same seed, others have others: a script is by seed."""
    fields: dict[str, Any] = {"max_tokens": 9, "logprobs": 1, "stops": ()} | SAMPLING[mode] | sampling
    found = []
    for id_ in range(first, first + count):
        length = lengths[id_ % len(lengths)]
        seed = id_ + 8 * length + 200 * MODES.index(mode)
        found.append(request(id_, prompt(length, id_), seed=seed, **fields))
    return found


def _ending(requests: list[Request], alone: dict[int, tuple[int, ...]], least: int = 0) -> list[Request]:
    """Each with a stop id that it draws for the first time as late as possible, but at token ``least`` or behind."""
    found = []
    for one in requests:
        tokens = alone[one.request_id]
        at = [i for i in range(least, len(tokens)) if tokens[i] not in tokens[:i]]
        found.append(replace(one, stop_token_ids=(tokens[at[-1]],)) if at else one)
    return found


Serial = Callable[[list[Request]], Life]


def scenarios(mode: str, serial: Serial) -> dict[str, Scenario]:
    """All of them in ``mode``. ``serial``: what the serial engine makes of some requests."""
    six = people(4, mode, max_tokens=12)
    alone = {i: tokens for i, (tokens, _) in serial(six).answers.items()}
    lengths = [replace(r, sampling=replace(r.sampling, max_tokens=1 + 4 * i)) for i, r in enumerate(people(4, mode))]
    pairs = people(8, mode, lengths=(6,), max_tokens=2)

    def pauses(engine: Engine, turn: int) -> None:
        if turn == 3:
            engine.pause(0)
            engine.pause(2)
        if turn == 9:
            engine.resume(0)
            engine.resume(2)

    def cancels(engine: Engine, turn: int) -> None:
        if turn == 0:
            engine.cancel(5)
        if turn == 3:
            engine.cancel(0)
        if turn == 5:
            engine.cancel(2, FinishReason.STOP)

    def several(engine: Engine, turn: int) -> None:
        if turn == 2:
            engine.pause(3)
        if turn == 4:
            engine.cancel(0)
            engine.pause(1)
            engine.resume(3)
        if turn == 8:
            engine.resume(1)

    ends = _ending(people(4, mode, max_tokens=12), alone, 2)
    return {
        "finish": Scenario(lengths),
        "stop id": Scenario(_ending(six, alone)),
        "all ending": Scenario(pairs[:4], {1: pairs[4:]}),
        "staggered admission": Scenario(
            people(1, mode), {1: people(1, mode, first=1), 3: people(2, mode, first=2), 4: people(2, mode, first=4)}
        ),
        "pause": Scenario(people(4, mode, max_tokens=13), act=pauses),
        "evict": Scenario(people(4, mode, lengths=(9, 7), max_tokens=22)),
        "cancel": Scenario(people(6, mode, max_tokens=11), act=cancels, cut=frozenset({0, 2, 5})),
        "block boundary": Scenario(people(4, mode, lengths=(7,), max_tokens=10)),
        "several in one step": Scenario(ends, {4: people(1, mode, first=4)}, several, frozenset({0})),
    }


@dataclass
class Written(Life):
    """``states``: of each request that came to its end, what its slot held when it became free. ``last_turns``: when
    each request ended."""

    states: dict[int, list[Tensor]] = field(default_factory=dict)
    last_turns: dict[int, int] = field(default_factory=dict)


def play(engine: Engine, scenario: Scenario, *, poison: bool = True) -> Written:
    """One scenario, beginning with nothing in flight. With ``poison`` there is NaN in all state and blocks that nobody
    has, before each turn; after each turn slots are looked at."""
    life, later = Written(), dict(scenario.later)
    before, turn_now = dict(engine.counters), 0
    life.asked = {i: one.sampling.logprobs or 0 for one in scenario.everybody for i in one.answer_ids}

    def turn_begins(engine: Engine, turn: int) -> None:
        nonlocal turn_now
        turn_now = turn
        for one in later.pop(turn, ()):
            engine.add(one)
        if scenario.act is not None:
            scenario.act(engine, turn)
        if poison:
            on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
            fill_with_nan(engine, idle_blocks(engine))

    def turn_over(output: StepOutput) -> None:
        life.watch(output)
        life.finished |= {ended.request_id: ended for ended in output.finished}
        life.last_turns |= {ended.request_id: turn_now for ended in output.finished}
        freed = look_at_slots(engine)
        for slot, request_id in freed.items():
            if request_id in life.finished and life.finished[request_id].reason in _DONE:
                engine.executor.device.compute.synchronize()
                life.states[request_id] = [bank[:, slot].clone() for bank in engine.executor.pool.banks]

    run(engine, scenario.requests, turn_begins, turn_over)
    assert not later, "everything was over before the last request arrived"
    life.counters = {name: count - before.get(name, 0) for name, count in engine.counters.items()}
    slots = engine.scheduler.slots
    assert (slots.free_count, slots.fenced_count) == (slots.count, 0)
    return life


def look_at_slots(engine: Engine) -> dict[int, int]:
    """After a turn: no free slot is touched by a step in flight, and no other is kept back. Returns the owners of those
    that became free."""
    slots = engine.scheduler.slots
    free = set(slots._free)
    in_flight = {slot for flight in engine._in_flight if flight.planned for slot in flight.planned.slots}
    held = {one.slot for one in engine.scheduler.resources.sequences.values() if one.slot}
    assert not free & in_flight, "a slot is free while a round in flight may touch it"
    kept = set(range(1, slots.count + 1)) - free - in_flight - held
    assert not kept, "a slot is kept although the last round that may touch it has landed"
    assert isinstance(engine.observe, Seats)
    owners = engine.observe.owners
    return {slot: owners.pop(slot) for slot in [*owners] if slot in free}
