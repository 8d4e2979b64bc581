"""Which kinds of sampling an engine offers: all, or fewer where a trial at start-up finds no memory on some rank.

Knows: the executor's search, over roles of so many tokens a row that are stand-ins. Does not know: what roles try
(test_late_trials.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import GREEDY
from runtime.execute.result_ring import NO_APPEND, ResultRing
from runtime.execute.sampling.inputs import EVERY_FEATURE, NARROWER_FEATURES, SamplingVariant
from runtime.execute.sampling.penalties import PenaltyFeature
from runtime.execute.slot_state import SlotTables
from runtime.execute.step.memory import Trial

BUCKETS = (1, 4, 8)
A_ROW = 10  # bytes that a token's logits take


class Tried:
    """What an executor's search needs of it: a GPU on which variants that cover ``too_much`` run out of memory. Roles
    have ``tokens`` a row; what one of their steps holds grows with them.

    ``others``: what the other ranks find. ``tried``: (tokens, variant) of largest steps that ran, ``smaller``: of those
    before. ``compiled``: (tokens, bucket, variant) of those whose kernels were compiled ahead. ``step``: what the
    largest step takes, ``constant``: what a trial takes whatever its rows.
    """

    _has_room_for = Executor._has_room_for
    _widest_variant = Executor._widest_variant
    _trials = Executor._trials
    _all_hold = Executor._all_hold
    _peak_of = Executor._peak_of

    def __init__(
        self,
        too_much: SamplingVariant | None = None,
        *,
        warm: SamplingVariant = GREEDY,
        free: int = 200,
        others: Callable[[], int] = lambda: 1,
        tokens: tuple[int, ...] = (1,),
        step: int = 0,
        constant: int = 0,
    ) -> None:
        self.tried: list[tuple[int, SamplingVariant]] = []
        self.smaller: list[tuple[int, SamplingVariant]] = []
        self.sizing, self._constant = SimpleNamespace(activation_peak=step), constant
        self.compiled: list[tuple[int, int, SamplingVariant]] = []
        self.dropped = self.started_over = self._held = 0
        self._compiling = self._small_tables = False
        self._config = SimpleNamespace(
            warm_variants=(warm,), decode_buckets=BUCKETS, agree_min=lambda mine: min(mine, others())
        )
        self._too_much = too_much
        self._ring = SimpleNamespace(start_over=self._start_over)
        late = SimpleNamespace(name="penalties", tables=None, need=lambda: None)
        self.tables = SimpleNamespace(
            trial=self._trial, features_of=lambda variant: [late] if variant.penalties else []
        )
        self._roles = {str(W): SimpleNamespace(trials=partial(self._trials_of, W)) for W in tokens}
        self.device = SimpleNamespace(
            torch_device=torch.device("cuda"),
            compute=SimpleNamespace(submit=lambda work: work(), synchronize=lambda: None),
            peak_of=self._measured,
            memory_info=lambda: SimpleNamespace(free=free),
            release_unused=lambda: None,
        )

    def _start_over(self) -> None:
        self.started_over += 1

    @contextmanager
    def _trial(self, slots: int | None = None) -> Iterator[None]:
        self._small_tables = slots == 1
        yield
        self._small_tables = False
        self.dropped += slots is None

    def _compile_ahead(self, *works: Trial) -> None:
        self._compiling = True
        for work in works:
            work()
        self._compiling = False

    def _trials_of(self, tokens: int, bucket: int, variant: SamplingVariant) -> list[Trial]:
        return [partial(self._try, tokens, bucket, variant)]

    def _try(self, tokens: int, bucket: int, variant: SamplingVariant) -> None:
        if self._compiling:
            assert self._small_tables, "tables of all slots may be large"
            self.compiled.append((tokens, bucket, variant))
            return
        assert not self._small_tables
        self._held = bucket * tokens * A_ROW + self._constant
        (self.tried if bucket == BUCKETS[-1] else self.smaller).append((tokens, variant))
        if self._too_much is not None and variant.covers(self._too_much):
            raise torch.OutOfMemoryError("CUDA out of memory")

    def _measured(self, work: Trial) -> int:
        self._held = 0
        work()
        return self._held

    @property
    def widest(self) -> SamplingVariant:
        return cast(Any, self)._widest_variant()  # type: ignore[no-any-return]


def test_everything_is_offered_where_it_fits() -> None:
    one = Tried()
    assert one.widest == EVERY_FEATURE
    assert one.tried == [(1, EVERY_FEATURE)]
    assert one.dropped == 1, "the tables that only the trial needed are given back"
    assert one.started_over == 0


@pytest.mark.parametrize(
    ("too_much", "offered"),
    [
        (SamplingVariant(penalties=True), NARROWER_FEATURES[0]),
        (SamplingVariant(logprobs=True), NARROWER_FEATURES[1]),
        (SamplingVariant(filters=True), NARROWER_FEATURES[2]),
        (SamplingVariant(random=True), GREEDY),
    ],
)
@pytest.mark.parametrize("tokens", [(1,), (4, 1)])
def test_the_widest_that_runs_is_offered(
    too_much: SamplingVariant, offered: SamplingVariant, tokens: tuple[int, ...]
) -> None:
    assert Tried(too_much, tokens=tokens, free=640).widest == offered


def test_what_was_warmed_up_is_always_offered() -> None:
    warm = SamplingVariant(penalties=True)
    assert Tried(SamplingVariant(random=True), warm=warm).widest == warm


def test_graphs_must_have_room_beside_a_trial_and_on_every_rank() -> None:
    assert Tried(free=159).widest == GREEDY
    assert Tried(free=160).widest == EVERY_FEATURE
    assert Tried(others=lambda: 0).widest == GREEDY
    assert Tried(free=80 + 99, step=100).widest == GREEDY, "a prefill step runs beside the graph"
    assert Tried(free=80 + 100, step=100).widest == EVERY_FEATURE
    assert Tried(free=159, step=79).widest == GREEDY, "and so does what a capture runs first"


@pytest.mark.parametrize("constant", [0, 50])
def test_the_largest_step_is_tried_only_where_smaller_ones_say_that_it_fits_on_every_rank(constant: int) -> None:
    """A rank out of memory inside it would leave the others waiting in its exchanges."""
    most = 2 * (80 + constant)
    short = Tried(free=most - 1, constant=constant)
    assert (short.widest, short.tried) == (GREEDY, [])
    assert short.smaller[:2] == [(1, EVERY_FEATURE)] * 2
    enough = Tried(free=most, constant=constant)
    assert (enough.widest, enough.tried) == (EVERY_FEATURE, [(1, EVERY_FEATURE)])
    answers = iter([1, 1, 0, *[1] * 9])
    other = Tried(others=lambda: next(answers))
    assert other.widest == NARROWER_FEATURES[0]
    assert other.tried == [(1, NARROWER_FEATURES[0])], "another rank has no room for everything"


@pytest.mark.parametrize("tokens", [(1, 4), (4, 1), (2, 1, 4)])
def test_a_window_that_does_not_fit_is_not_offered_because_decode_does(tokens: tuple[int, ...]) -> None:
    assert Tried(tokens=tokens, free=160).widest == GREEDY
    assert Tried(tokens=tokens, free=639).widest == GREEDY
    one = Tried(tokens=tokens, free=640)
    assert one.widest == EVERY_FEATURE
    assert one.tried == [(W, EVERY_FEATURE) for W in tokens], "each role's largest step"


def test_every_rank_leaves_the_trials_behind_the_same_one() -> None:
    """This one would have gone on to the second role, whose exchanges another one that failed is not in."""
    answers = iter([1] * (1 + 3) + [1, 1, 0] + [1] * 9)  # tables, then three sizes of each role
    one = Tried(others=lambda: next(answers), tokens=(2, 4, 1), free=1000)
    assert one.widest == NARROWER_FEATURES[0]
    second = NARROWER_FEATURES[0]
    assert one.tried == [(2, EVERY_FEATURE), (4, EVERY_FEATURE), (2, second), (4, second), (1, second)]


def test_kernels_of_every_role_are_compiled_ahead_over_the_fewest_rows() -> None:
    one = Tried(SamplingVariant(penalties=True), tokens=(4, 1), free=640)
    assert one.widest == NARROWER_FEATURES[0]
    variants = EVERY_FEATURE, NARROWER_FEATURES[0]
    assert one.compiled == [(W, BUCKETS[0], variant) for variant in variants for W in (4, 1)]


def test_a_trial_that_failed_behind_its_append_leaves_no_result() -> None:
    with TwinDevice() as device:
        ring = ResultRing(device, entries=3, rows=2, width=1)
        one = Tried(SamplingVariant(random=True))
        counts_B = torch.zeros(2, dtype=torch.int32)

        def append(*_: object) -> None:
            ring.append(torch.zeros(2, 1, dtype=torch.int64), counts_B, counts_B)
            raise torch.OutOfMemoryError("CUDA out of memory")

        one._ring = cast(Any, ring)
        assert cast(Any, one)._peak_of(append) == math.inf
        assert ring.appended_1.item() == 0
        assert ring.latest is None
        assert set(ring.buffer_EX[:, 0].tolist()) == {NO_APPEND}


@pytest.mark.parametrize("at_once", [True, False])
def test_late_tables_of_a_trial_are_given_back(at_once: bool) -> None:
    with TwinDevice() as device:
        tables = SlotTables(device, max_requests=5, max_blocks=2, vocab_size=7, late_bytes=None if at_once else 0)
        before = [feature.tables for feature in tables.features]
        (seen,) = (feature for feature in tables.features if isinstance(feature, PenaltyFeature))
        with tables.trial(slots=1):
            assert len(seen.need().counts) == len(seen.need().prompt) == (6 if at_once else 1)
        assert (seen.tables is not None) == at_once
        with tables.trial():
            assert len(seen.need().counts) == 6
        assert all(feature.tables is table for feature, table in zip(tables.features, before, strict=True))
