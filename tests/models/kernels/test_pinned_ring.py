"""Rings of prefill plans have places for every step in flight: the host never waits for one that is on its way."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from models.kernels.pinned_ring import PinnedRing, ring_places

CPU = torch.device("cpu")
DEPTHS = (0, 1, 4, 16, 64)


class StandingDevice:
    """Passes nothing that is queued: whoever waits for it would wait for ever."""

    class Event:
        def __init__(self) -> None:
            self.recorded = False

        def record(self) -> None:
            self.recorded = True

        def synchronize(self) -> None:
            assert not self.recorded, "the host waits for the oldest step in flight"


def events_of(device: torch.device) -> Any:
    return StandingDevice.Event


def test_what_is_queued_is_waited_for_before_it_is_handed_out_again() -> None:
    ring = PinnedRing("ab", StandingDevice.Event)
    for expected in "ab":
        assert ring.take() == expected
        ring.queued()
    with pytest.raises(AssertionError, match="oldest step in flight"):
        ring.take()


def test_without_events_the_places_are_taken_in_turn() -> None:
    ring: PinnedRing[str] = PinnedRing("abc", None)
    taken = []
    for _ in range(7):
        taken.append(ring.take())
        ring.queued()
    assert "".join(taken) == "abcabca"


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module over FlashInfer's prefill, over a wrapper that plans nothing."""
    planned = SimpleNamespace(plan=lambda *_: [1, 2])

    class Wrapper:
        def __init__(self, *_: object, **__: object) -> None:
            self._pin_memory_int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)
            self._float_workspace_buffer = self._int_workspace_buffer = torch.zeros(8)
            self._plan_info, self._cached_module = [1, 2], planned

        def plan(self, *_: object, **__: object) -> None:
            pass

    flashinfer, jit, its_prefill = ModuleType("flashinfer"), ModuleType("flashinfer.jit"), ModuleType("prefill")
    its_prefill.__dict__.update(BatchPrefillWithPagedKVCacheWrapper=Wrapper, get_batch_prefill_module=lambda *_: None)
    jit.__dict__.update(cpp_ext=None, gen_batch_prefill_module=None)
    for name, module in (("", flashinfer), (".jit", jit), (".prefill", its_prefill)):
        monkeypatch.setitem(sys.modules, f"flashinfer{name}", module)
    for name in ("flashinfer_build", "flashinfer_prefill"):
        monkeypatch.delitem(sys.modules, f"models.kernels.attention.{name}", raising=False)
    module = importlib.import_module("models.kernels.attention.flashinfer_prefill")
    for name in ("flashinfer_build", "flashinfer_prefill"):  # nobody else finds the one that was made over a stand-in
        monkeypatch.delitem(sys.modules, f"models.kernels.attention.{name}", raising=False)
    monkeypatch.setattr(module, "event_of", events_of)
    monkeypatch.setattr(module, "_pinned_bytes", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(module, "_pinned", lambda values: torch.tensor(values, dtype=torch.int32))
    monkeypatch.setattr(module, "_PREFILL_WORKSPACE", 64)
    return module


@pytest.mark.parametrize("depth", DEPTHS)
def test_flashinfer_plans_every_step_in_flight_and_one_more(depth: int, paged: ModuleType) -> None:
    from models.inputs import PrefillAttention

    kv = torch.zeros(2, 3, 16, 2, 128, dtype=torch.bfloat16)
    table = torch.ones(4, 2, dtype=torch.int32)
    prefill = paged.PagedPrefill(CPU, "fa3", depth)
    repeated = prefill.repeated(table, 64, 4, kv)
    for step in range(depth + 1):
        prefill.plan(PrefillAttention(table, (5,), (5 + step,)), 4, kv)
        repeated.plan((5,), (5 + step,))
    assert len(prefill.ring) == len(repeated.ring) == ring_places(depth) > depth + 1
