"""Which kinds of sampling an engine offers: all, or fewer where a trial at start-up finds no memory on some rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runtime.execute.executor import Executor
from runtime.execute.launch_spec import GREEDY
from runtime.execute.sampling.inputs import EVERY_FEATURE, NARROWER_FEATURES, SamplingVariant


class Tried:
    """What an executor's search needs of it: a GPU on which variants that cover ``too_much`` run out of memory."""

    _has_room_for = Executor._has_room_for
    _widest_variant = Executor._widest_variant

    def __init__(
        self, too_much: SamplingVariant | None, *, warm: SamplingVariant = GREEDY, free: int = 100, others: int = 1
    ) -> None:
        self.tried: list[SamplingVariant] = []
        self.dropped = 0
        config = SimpleNamespace(warm_variants=(warm,), decode_buckets=(1, 8), agree_min=lambda mine: min(mine, others))
        self._config = config
        self._too_much = too_much
        self.tables = SimpleNamespace(seen=None, drop_seen=self._drop)
        self.decode = SimpleNamespace(try_variant=self._try)
        self.device = SimpleNamespace(
            torch_device=torch.device("cuda"),
            peak_of=lambda work: work() or 60,
            memory_info=lambda: SimpleNamespace(free=free),
            release_unused=lambda: None,
        )

    def _drop(self) -> None:
        self.dropped += 1

    def _try(self, bucket: int, variant: SamplingVariant) -> None:
        assert bucket == 8
        self.tried.append(variant)
        if self._too_much is not None and variant.covers(self._too_much):
            raise torch.OutOfMemoryError("CUDA out of memory")

    @property
    def widest(self) -> SamplingVariant:
        return cast(Any, self)._widest_variant()  # type: ignore[no-any-return]


def test_everything_is_offered_where_it_fits() -> None:
    one = Tried(None)
    assert one.widest == EVERY_FEATURE
    assert one.tried == [EVERY_FEATURE]
    assert one.dropped == 1, "the tables that only the trial needed are given back"


@pytest.mark.parametrize(
    ("too_much", "offered"),
    [
        (SamplingVariant(penalties=True), NARROWER_FEATURES[0]),
        (SamplingVariant(logprobs=True), NARROWER_FEATURES[1]),
        (SamplingVariant(filters=True), NARROWER_FEATURES[2]),
        (SamplingVariant(random=True), GREEDY),
    ],
)
def test_the_widest_that_runs_is_offered(too_much: SamplingVariant, offered: SamplingVariant) -> None:
    assert Tried(too_much).widest == offered


def test_what_was_warmed_up_is_always_offered() -> None:
    warm = SamplingVariant(penalties=True)
    assert Tried(SamplingVariant(random=True), warm=warm).widest == warm


def test_graphs_must_have_room_beside_a_trial_and_on_every_rank() -> None:
    assert Tried(None, free=59).widest == GREEDY
    assert Tried(None, others=0).widest == GREEDY
