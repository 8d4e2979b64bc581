"""Whose prefill attention runs: FlashInfer's where it is built on every machine, ours elsewhere, and what is told.

Without a GPU: what asks for FlashInfer gets a stand-in.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import models.kernels.attention
from models.inputs import PrefillAttention
from models.kernels.traits import H200
from tests.plant import Op, kernels_with
from tests.runtime.engine.rig import request, rig, run

pytest.importorskip("triton")
prefill = importlib.import_module("models.kernels.attention.prefill_choice")

BF16 = torch.bfloat16
CPU = torch.device("cpu")


class FlashInfer:
    """Both modules that know FlashInfer. ``built``: on this machine. ``load`` runs where it is built or loaded."""

    def __init__(self, built: bool = True, load: Callable[[], object] = lambda: None) -> None:
        self.built, self.load = built, load
        self.loaded: list[tuple[object, ...]] = []
        self.built_aside: list[object] = []
        self.stops: str | None = None

    def modules(self) -> dict[str, ModuleType]:
        attention, build = ModuleType("flashinfer_prefill"), ModuleType("flashinfer_build")
        paged = SimpleNamespace(plan=lambda *_: "planned", repeated=lambda *_: "repeated")
        attention.__dict__.update(load_module=self._load, PagedPrefill=lambda device, backend, depth: paged)
        build.__dict__.update(
            spec_of=lambda *asked: asked,
            is_built=lambda spec: self.built,
            obstacle=lambda switches: self.stops,
            build_in_background=self._build_aside,
        )
        return {"flashinfer_prefill": attention, "flashinfer_build": build}

    def _load(self, *asked: object) -> None:
        self.loaded.append(asked)
        self.load()

    def _build_aside(self, spec: object) -> Path:
        self.built_aside.append(spec)
        return Path("build-aside.log")


Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """A Prefill over a FlashInfer, on a GPU of compute capability 9.0."""

    def made(flashinfer: FlashInfer | None, wanted: str = "auto", capability: int = 9) -> Any:
        for name in ("flashinfer_prefill", "flashinfer_build"):
            module = None if flashinfer is None else flashinfer.modules()[name]
            monkeypatch.setitem(sys.modules, f"models.kernels.attention.{name}", module)
            monkeypatch.delattr(models.kernels.attention, name, raising=False)
            if module is not None:
                monkeypatch.setattr(models.kernels.attention, name, module, raising=False)
        return prefill.Prefill(CPU, wanted, dataclasses.replace(H200, capability=(capability, 0)))

    return made


def agreed(one: Any, dtype: torch.dtype = BF16, head_dim: int = 128, least: Callable[[int], int] = int) -> str:
    one.prepare(dtype, head_dim)
    one.agree(least)
    name: str = one.name
    return name


def told(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [record.getMessage() for record in caplog.records]
    return line


def test_what_is_built_is_taken_without_a_word(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    flashinfer = FlashInfer()
    one = make(flashinfer)
    assert (agreed(one), one.slower) == ("flashinfer", None)
    assert flashinfer.loaded == [("fa3", BF16, 128)]
    assert (flashinfer.built_aside, caplog.records) == ([], [])


def test_its_programs_of_128_tokens_of_a_head_are_one_a_multiprocessor(make: Make) -> None:
    one = make(FlashInfer())
    assert agreed(one) == "flashinfer"
    assert [one.wave(heads, 128) for heads in (8, 32, 40, 200)] == [(128, 16), (128, 4), (128, 3), (128, 1)]
    assert one.wave(32, 256) == (0, 0), "not measured"
    ours = make(FlashInfer(), "triton")
    assert agreed(ours) == "triton"
    assert ours.wave(32, 128) == (0, 0)


def test_what_is_not_built_is_built_for_the_next_start(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    flashinfer = FlashInfer(built=False)
    assert agreed(make(flashinfer)) == "triton"
    assert flashinfer.loaded == []
    assert flashinfer.built_aside == [("fa3", BF16, 128)]
    assert "slower" in told(caplog)
    assert "for the next start" in told(caplog)
    assert "build-aside.log" in told(caplog)


def test_one_machine_without_it_is_enough(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    flashinfer, asked = FlashInfer(), []

    def least(number: int) -> int:
        asked.append(number)
        return 0

    assert agreed(make(flashinfer), least=least) == "triton"
    assert asked == [1]
    assert flashinfer.built_aside == []
    assert "another machine" in told(caplog)


def test_every_rank_is_asked_whatever_it_has(make: Make) -> None:
    """It is a collective: one that left it out would let the others wait."""
    for flashinfer, wanted, dtype in (
        (None, "auto", BF16),
        (FlashInfer(), "triton", BF16),
        (FlashInfer(), "auto", torch.float32),
        (FlashInfer(built=False), "auto", BF16),
    ):
        asked: list[int] = []

        def least(number: int, asked: list[int] = asked) -> int:
            asked.append(number)
            return number

        assert agreed(make(flashinfer, wanted), dtype, least=least) == "triton"
        assert asked == [0]


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 128), (BF16, 80)])
def test_what_flashinfer_does_not_take_is_ours(
    make: Make, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, head_dim: int
) -> None:
    flashinfer = FlashInfer()
    assert agreed(make(flashinfer, "flashinfer"), dtype, head_dim) == "triton"
    assert flashinfer.loaded == []
    assert f"not {dtype} with head_dim {head_dim}" in told(caplog)


def test_without_flashinfer_it_is_ours(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert agreed(make(None)) == "triton"
    assert "pip install 'lockstride[cuda]'" in told(caplog)


def test_without_a_compiler_it_is_ours(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    flashinfer = FlashInfer(built=False)
    flashinfer.stops = "there is no nvcc"
    assert agreed(make(flashinfer)) == "triton"
    assert flashinfer.built_aside == []
    assert "there is no nvcc" in told(caplog)


@pytest.mark.parametrize("wanted", ["auto", "flashinfer"])
def test_a_module_that_fails_leaves_ours(make: Make, caplog: pytest.LogCaptureFixture, wanted: str) -> None:
    def fail() -> None:
        raise RuntimeError("Ninja build failed")

    one = make(FlashInfer(load=fail), wanted)
    assert agreed(one) == "triton"
    one.agree(int)
    assert "Ninja build failed" in told(caplog)
    assert "Ninja build failed" in one.slower


def test_a_build_that_is_asked_for_is_waited_for(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    may_end = threading.Event()
    flashinfer = FlashInfer(built=False, load=lambda: may_end.wait(300))
    one = make(flashinfer, "flashinfer")
    threading.Timer(0.05, may_end.set).start()
    assert agreed(one) == "flashinfer"
    assert may_end.is_set()
    assert (flashinfer.built_aside, caplog.records) == ([], [])


def test_ours_never_asks_for_it(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    flashinfer = FlashInfer()
    assert agreed(make(flashinfer, "triton")) == "triton"
    assert (flashinfer.loaded, flashinfer.built_aside, caplog.records) == ([], [], [])


def test_other_gpus_run_ours_unless_told(make: Make) -> None:
    """There FlashInfer's cannot be captured."""
    assert agreed(make(FlashInfer(), capability=8)) == "triton"
    flashinfer = FlashInfer(built=False)
    assert agreed(make(flashinfer, "flashinfer", capability=8)) == "flashinfer"
    assert flashinfer.loaded == [("fa2", BF16, 128)]


def test_heads_that_neither_takes_are_told(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert agreed(make(FlashInfer()), head_dim=1024) == "reference"
    assert "plain torch" in told(caplog)


def test_plans_are_those_of_what_was_agreed(make: Make) -> None:
    kv = torch.zeros(2, 3, 16, 2, 128, dtype=BF16)
    table = torch.ones(1, 2, dtype=torch.int32)
    inputs = prefill.PrefillAttention(table, (5,), (9,))
    one = make(FlashInfer())  # without an agreement: for this machine alone
    assert one.plan(inputs, 4, kv).planned == "planned"
    assert one.repeated(table, 64, 4, kv) == "repeated"
    ours = make(FlashInfer(), "triton")
    assert ours.plan(inputs, 4, kv).planned.tiles.tolist() == [[0, 5, 4, 0]]
    assert isinstance(ours.repeated(table, 64, 4, kv), prefill.RepeatedTiles)


def test_ranks_agree_before_the_first_prefill_is_planned() -> None:
    calls: list[object] = []

    def agreed(_: Op, agree_min: Callable[[int], int]) -> None:
        calls.append(agree_min)

    def planned(_: Op, inputs: PrefillAttention, *rest: Any) -> PrefillAttention:
        calls.append("plan")
        return inputs

    def repeated(*_: Any) -> None:
        calls.append("repeat")

    kernels = kernels_with(agree_on_kernels=agreed, plan_prefill=planned, repeat_prefill=repeated)
    with rig(kernels=kernels, prefill_buckets=(32,)) as engine:
        run(engine, [request(0, range(9), max_tokens=2)])
    assert calls[0] is int, "the executor's agree_min"
    assert calls.count(int) == 1
    assert {"plan", "repeat"} <= set(map(str, calls))
