"""Prefix caching of models with recurrent state: who goes on from a snapshot gives the tokens of who computed it all.

Every life is compared with the serial engine without prefix caching, in float64. Where snapshots are left, and what is
lost with what, is in tests/runtime/schedule/test_snapshots.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product, starmap
from typing import Any

import pytest
import torch
from torch import Tensor

from models.registry import ARCHITECTURES
from runtime.engine import Engine
from runtime.execute.launch_spec import LaunchSpec
from runtime.schedule.config import SnapshotPolicy
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.speculation import Speculation
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Life, live, prompt, same, unbroken
from tests.runtime.engine.rig import request
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.runtime.engine.test_speculation import ngram
from tests.selection import covering

SHAPES = {"toy": HYBRID, **FAMILIES, "nemotron": NEMOTRON}
POLICY = SnapshotPolicy(4, interval=3, worth=1)
STEM = 45  # tokens: 5 blocks of 8, and a part of one


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)


def sharers(count: int = 6, **sampling: Any) -> list[Request]:
    """Prompts with a common beginning, of which two are equal, and one of its own."""
    sampling = {"temperature": 1.0, "logprobs": 2, "stops": (), **sampling}
    asked = [request(i, (*prompt(STEM), *prompt(3 + 5 * (i % 4), i % 4 + 1)), **sampling) for i in range(count)]
    return [*asked, request(90, prompt(30, 9), **sampling)]


def behind_a_stem(count: int) -> list[Request]:
    """Two blocks that all have in common, and more than a chunk of their own."""
    fields: dict[str, Any] = {"temperature": 1.0, "logprobs": 2, "stops": (), "max_tokens": 6}
    return [request(i, (*prompt(16), *prompt(4 + i, i + 1)), **fields) for i in range(count)]


def later(requests: list[Request], turns: int) -> dict[int, list[Request]]:
    """All but the first arrive one after the other."""
    return {turns * (i + 1): [one] for i, one in enumerate(requests[1:])}


def restoring(requests: list[Request], family: str = "toy", *, depth: int, **limits: Any) -> Life:
    given: dict[str, Any] = {"shape": SHAPES[family], "snapshots": POLICY, **limits}
    return live(requests[:1], depth=depth, later=later(requests, 2), **given)


def alone(requests: list[Request], family: str = "toy", kv_dtype: torch.dtype | None = None) -> Life:
    return _serial(tuple(requests), family, kv_dtype)


@cache
def _serial(requests: tuple[Request, ...], family: str, kv_dtype: torch.dtype | None) -> Life:
    limits: dict[str, Any] = {"prefix_caching": False, "max_prefill_tokens": 200, "shape": SHAPES[family]}
    return live(list(requests), depth=0, rows=24, blocks=400, kv_dtype=kv_dtype, **limits)


@pytest.mark.parametrize(("depth", "chunk"), covering(range(5), (5, 64), at_once=1))
def test_whoever_goes_on_from_a_snapshot_gives_the_same_tokens(depth: int, chunk: int) -> None:
    requests = sharers(max_tokens=12)
    life = restoring(requests, depth=depth, max_prefill_tokens=chunk)
    same(life, alone(requests))
    assert life.counters["snapshot_restores"] >= 3
    assert life.counters["prefix_hit_tokens"] > 3 * 40
    if depth:
        unbroken(life)


@pytest.mark.parametrize(
    ("family", "depth"), [("qwen3-next", 0), ("nemotron", 2), *starmap(long, product([*FAMILIES, "nemotron"], (0, 2)))]
)
def test_each_family_does(family: str, depth: int) -> None:
    """Windows of convolutions lie across the end of the block."""
    requests = sharers(5, max_tokens=8)
    life = restoring(requests, family, depth=depth, max_prefill_tokens=20)
    same(life, alone(requests, family))
    assert life.counters["snapshot_restores"] >= 3


@pytest.mark.parametrize(("family", "chunk", "depth"), covering(("qwen3.5", "nemotron"), (1, 2, 3), (0, 2), at_once=1))
def test_what_follows_a_prefix_comes_in_chunks_shorter_than_the_taps(family: str, chunk: int, depth: int) -> None:
    """Windows of 4 taps reach over several chunks, and over the end of the prefix."""
    requests = behind_a_stem(4)
    life = restoring(requests, family, depth=depth, max_prefill_tokens=chunk)
    same(life, alone(requests, family))
    assert life.counters["prefix_hit_tokens"] == 3 * 16
    seated = [(plan, {slot for _, slot in plan.restored}) for plan in life.real_plans if plan.restored]
    first = [one for plan, slots in seated for one in plan.chunks if one.slot in slots]
    assert [(one.start, one.last) for one in first] == [(16, False)] * 3
    assert max(len(one.token_ids) for one in first) == chunk
    assert any(plan.decode_rows for plan, _ in seated), "among rows that decode"


def poison(engine: Engine, turn: int) -> None:
    """NaN in the null slot, free slots, free snapshots and idle blocks."""
    scheduler, snapshots = engine.scheduler, engine.scheduler.ledger.snapshots
    assert snapshots is not None
    free = [scheduler.slots.count + row for row in snapshots._free]
    on_banks(engine, [0, *scheduler.slots._free, *free], float("nan"))
    fill_with_nan(engine, idle_blocks(engine))


@pytest.mark.parametrize("depth", [long(0), 2, long(4)])
def test_with_little_room_snapshots_blocks_and_rows_go_and_come_back(depth: int) -> None:
    """NaN before every turn in all that belongs to nobody."""
    requests = sharers(8, max_tokens=40)
    limits: dict[str, Any] = {"blocks": 26, "rows": 4, "buckets": (4, 8), "snapshots": SnapshotPolicy(2, 2, 1)}
    life = restoring(requests, depth=depth, act=poison, **limits)
    same(life, alone(requests))
    assert min(life.counters[name] for name in ("evictions", "snapshot_evictions", "snapshot_restores")) > 0


@pytest.mark.parametrize("depth", [1, 4])
def test_the_writer_may_leave(depth: int) -> None:
    """Cancelled right behind the step that leaves its snapshot, whether that has run or not."""
    writer, reader = (request(i, prompt(45), max_tokens=8, stops=()) for i in range(2))

    def cancel(engine: Engine, turn: int) -> None:
        if turn == 1:
            engine.cancel(0)

    life = live([writer], cancel, depth=depth, later={1: [reader]}, shape=HYBRID, snapshots=POLICY)
    assert life.finished[0].reason is FinishReason.CANCELLED
    assert life.answers[1] == alone([reader]).answers[1]
    assert life.counters["prefix_hit_tokens"] == 24


@pytest.mark.parametrize("depth", [0, 2])
def test_forked_answers_begin_with_the_state_of_their_prompt(depth: int) -> None:
    """Copied in the step that forks them, beside the snapshots of other rows; the second time behind a prefix."""
    requests = [request(10 * i, prompt(45), n=3, temperature=1.0, max_tokens=9, stops=()) for i in range(3)]
    life = restoring(requests, depth=depth, rows=12)
    answers = [answer for one in requests for answer in one.answers()]
    assert life.answers == alone(answers).answers
    assert (life.counters["forks"], life.counters["snapshot_restores"]) == (6, 2)
    assert life.counters["prefill_tokens"] == 45 + 5 + 5


def test_two_ranks_keep_a_half_of_each_snapshot() -> None:
    requests = sharers(4, max_tokens=8)
    life = restoring(requests, depth=2, over=partial(tensor_rig, 2))
    same(life, alone(requests))
    assert life.counters["snapshot_restores"] >= 2


# ---- with speculation: what a window leaves of state is decided behind it, and no snapshot is of such a step ----


def guessing(width: int = 4) -> dict[str, Any]:
    """Limits of a life with n-gram windows; chunks of prompts may stand beside rows that decode."""
    return {"proposer": ngram(width), "speculation": Speculation(width, mixed_percent=100), "max_prefill_tokens": 20}


def repetitive(**sampling: Any) -> dict[str, Any]:
    """Few tokens are allowed, so answers repeat themselves and guesses are kept."""
    return {"max_tokens": 24, "temperature": 0.6, "allowed_token_ids": (5, 6, 7, 8), **sampling}


@pytest.mark.parametrize(("family", "depth"), [long("qwen3-next", 0), long("qwen3-next", 2), ("nemotron", 2)])
def test_windows_beside_prefixes_that_are_continued(family: str, depth: int) -> None:
    """NaN before every turn in all state and blocks that nobody has; some rows are evicted and go on from snapshots."""
    requests = sharers(6, **repetitive())
    limits: dict[str, Any] = guessing() | {"blocks": 24, "rows": 4}
    life = restoring(requests, family, depth=depth, act=poison, **limits)
    same(life, alone(requests, family))
    assert life.counters["snapshot_restores"] >= 3
    assert min(life.counters[name] for name in ("evictions", "spec_num_accepted_tokens", "mixed_steps")) > 0


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.long), 2])
def test_prefix_hits_behind_requests_that_ended_in_a_window(depth: int) -> None:
    """By a stop id or their length. Then the same prompts, and twice the next turn behind each answer, of which the
    first goes on from the prompt's snapshot and computes blocks that windows wrote once more.
    """
    keys = repetitive(max_tokens=26, min_tokens=17)
    first = [request(i, prompt(STEM, i), stops=(5,) if i else (), **keys) for i in range(3)]
    long = request(50, prompt(9, 50), max_tokens=110, temperature=1.0, stops=())
    answers = alone(first, "qwen3-next").answers
    behind = {i: (*prompt(STEM, i), *answers[i][0], 9, 10, 11) for i in range(3)}
    waves = {
        45: [request(10 + i, prompt(STEM, i), stops=(), **keys) for i in range(3)],
        46: [request(20 + i, behind[i], stops=(), **keys) for i in range(3)],
        60: [request(30 + i, behind[i], stops=(), **keys) for i in range(3)],
    }
    limits: dict[str, Any] = {"shape": SHAPES["qwen3-next"], "snapshots": SnapshotPolicy(12, 3, 1), **guessing()}
    life = live([long, *first], poison, depth=depth, later=waves, **limits)
    same(life, alone([long, *first, *(one for wave in waves.values() for one in wave)], "qwen3-next"))
    assert {reason for _, reason in answers.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert any(life.rounds[i][-1] > 1 for i in range(3)), "the last round of one kept a guess"
    assert life.counters["snapshot_restores"] == 9
    assert life.counters["prefix_hit_tokens"] == 6 * 40 + sum((len(behind[i]) - 1) // 8 * 8 for i in range(3))


# ---- mutants: what would be wrong is seen ----


def _restores_nothing(engine: Engine) -> None:
    engine.executor.staging.on_restored = None


def _keeps_a_step_late(engine: Engine) -> None:
    executor, late = engine.executor, list[Tensor]()

    def copy_late(spec: LaunchSpec) -> None:
        executor.device.compute.synchronize()
        late.append(executor.staging.kept_states(spec).clone())

    def launch(spec: LaunchSpec, inner: Callable[[LaunchSpec], None] = executor.launch) -> None:
        due, late[:] = list(late), []
        inner(spec)
        for pairs_2C in due:
            executor.device.compute.submit(partial(executor.pool.copy_states, pairs_2C))

    executor._copy_after = copy_late  # type: ignore[method-assign]
    executor.launch = launch  # type: ignore[method-assign]


def _keeps_nothing_of_slots(engine: Engine) -> None:
    engine.executor.pool._bank_copiers = []


@pytest.mark.parametrize("break_it", [_restores_nothing, _keeps_a_step_late, _keeps_nothing_of_slots])
def test_a_broken_copy_shows_in_tokens(break_it: Callable[[Engine], None]) -> None:
    requests = sharers(max_tokens=12)

    def act(engine: Engine, turn: int) -> None:
        if turn == 0:
            break_it(engine)

    life = restoring(requests, depth=0, act=act)
    assert life.answers != alone(requests).answers


@pytest.mark.parametrize(("family", "chunk"), [("qwen3.5", 1), ("nemotron", 3)])
def test_windows_that_are_left_out_show_in_chunks_shorter_than_the_taps(family: str, chunk: int) -> None:
    """Of snapshots of convolutions; the states of recurrences are copied."""
    requests = behind_a_stem(2)

    def act(engine: Engine, turn: int) -> None:
        if turn == 0:
            pool = engine.executor.pool
            assert [bank.dim() for bank in pool.banks] == [4, 5], "windows, then states"
            del pool._bank_copiers[0]

    life = restoring(requests, family, depth=0, act=act, max_prefill_tokens=chunk)
    assert life.counters["snapshot_restores"] == 1
    with pytest.raises(AssertionError):
        same(life, alone(requests, family))
