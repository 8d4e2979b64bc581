"""Kernels at start-up, where something is missing: no cuBLASLt, no memory to measure with.

Without a GPU: cuBLASLt's library is a stand-in, and measuring fails as it does there.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.kernels.matmul import autotune, candidates, choice_table
from models.kernels.matmul.choice_table import Blas, ChoiceTable, CublasLt, LinearShape, Skinny, Wide
from models.kernels.traits import H200, DeviceTraits

pytest.importorskip("triton")
dispatch = importlib.import_module("models.ops.tuned")

BF16 = torch.bfloat16
DECODE = LinearShape(16, 6144, 4096, BF16)
PREFILL = LinearShape(8192, 6144, 4096, BF16)
SKINNY = Skinny(64, 64, 128, 1, 4, 4, 128)
WIDE = Wide(64, 64, 64, 1, 4, 4, 64)


# ---- products ----


class Lt:
    """A cuBLASLt of one version that offers one algorithm, which runs up to ``most`` rows other than its own."""

    version = 130_100

    def __init__(self, most: int = 0) -> None:
        self.most = most

    def algorithms(self, *shape: object, most: int) -> list[str]:
        return ["00" * 64]

    def can_run(self, rows: int, *rest: object) -> bool:
        return rows <= self.most


def products(lt: Lt | None) -> Any:
    made = object.__new__(dispatch.TunedProducts)
    made.device, made.pdl, made.choices, made._lt = torch.device("cpu"), False, ChoiceTable(), lt
    made._resolved, made._runs = {}, {}
    made._partial, made.traits, made._slower = torch.empty(1 << 20), H200, {}
    return made


def test_without_cublaslt_its_choices_are_cublas(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    made = products(None)
    with caplog.at_level(logging.WARNING):
        assert made._open_cublaslt() is None
    assert "libcublasLt.so.13" in caplog.text
    assert "libcublasLt.so.13" in made.slower["cublas_products"]
    made.choices.put(DECODE, CublasLt("00" * 64, Lt.version))
    assert made.choice(DECODE) == Blas()
    assert all(not isinstance(choice, CublasLt) for choice in made.candidates(DECODE))


@pytest.mark.parametrize(
    ("version", "rows", "chosen"),
    [
        (Lt.version, 16, CublasLt),
        (Lt.version, 13, Blas),
        (Lt.version, 12, CublasLt),
        (Lt.version - 1, 16, Blas),
        (Lt.version - 1, 12, Blas),
    ],
)
def test_an_algorithm_is_good_for_one_version_and_rows_that_the_library_accepts(
    version: int, rows: int, chosen: type
) -> None:
    made = products(Lt(most=12))
    made.choices.put(DECODE, CublasLt("00" * 64, version))
    assert isinstance(made.choice(LinearShape(rows, 6144, 4096, BF16)), chosen)


@pytest.mark.parametrize(("gpu", "runs"), [(H200, True), (replace(H200, name="NVIDIA H100"), False)])
def test_what_rank_0_chose_is_checked_on_another_model_of_gpu_only(gpu: DeviceTraits, runs: bool) -> None:
    """cuBLASLt is asked about its own algorithms there; tiles must fit the shared memory."""
    algorithm, large = CublasLt("00" * 64, Lt.version), replace(SKINNY, block_o=256, stages=8)
    leader, follower = products(Lt()), products(Lt())
    leader.traits = gpu
    leader.choices.put(DECODE, algorithm)
    for rows, choice in ((32, SKINNY), (64, large)):
        leader.choices.put(LinearShape(rows, 6144, 4096, BF16), choice)
    told: list[str] = []
    leader.tune_seen(None, lambda make: told.append(make()) or told[0])  # type: ignore[func-returns-value]
    follower.tune_seen(None, lambda make: told[0])
    assert leader.choice(DECODE) == algorithm, "on the GPU itself it was measured"
    assert follower.choice(DECODE) == (algorithm if runs else Blas())
    assert follower.choice(LinearShape(32, 6144, 4096, BF16)) == SKINNY
    assert follower.choice(LinearShape(64, 6144, 4096, BF16)) == (large if runs else Blas())


def test_the_nearest_bucket_whose_kernel_runs_stands_in() -> None:
    made = products(Lt(most=0))
    for rows, choice in ((48, CublasLt("00" * 64, Lt.version)), (56, WIDE), (64, SKINNY), (128, SKINNY)):
        made.choices.put(LinearShape(rows, 6144, 4096, BF16), choice)
    asked = {rows: made.choice(LinearShape(rows, 6144, 4096, BF16)) for rows in (40, 48, 56, 60, 64, 72, 256)}
    assert (asked[48], asked[60]) == (CublasLt("00" * 64, Lt.version), SKINNY)
    assert asked[40] == asked[56] == SKINNY, "no algorithm of other rows, no TMA without the GPU for it"
    assert (asked[72], asked[256]) == (SKINNY, Blas())


def test_a_start_up_measures_what_nothing_stands_in_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of one octave the largest; the others where its winner cannot run them."""
    won: dict[int, choice_table.Choice] = {64: CublasLt("00" * 64, Lt.version), 32: SKINNY}
    timed: list[int] = []

    def fastest(shape: LinearShape, *_: object) -> tuple[choice_table.Choice, float]:
        timed.append(shape.rows)
        return won.get(shape.rows, Blas()), 12.5

    monkeypatch.setattr(autotune, "fastest", fastest)
    monkeypatch.setattr(choice_table, "cache_file", lambda folder, device: folder / "choices.json")
    made = products(Lt(most=48))
    shapes = [LinearShape(rows, 6144, 4096, BF16) for rows in (24, 32, 40, 48, 56, 64)]
    assert made.tune(shapes, tmp_path, quick=True) == 3
    assert timed == [64, 56, 32]
    assert made.choice(shapes[0]) == SKINNY
    assert products(Lt(most=48)).tune(shapes, tmp_path, quick=True) == 0, "the file has them"


def test_what_launch_tune_chose_overrules_the_shipped_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice_table, "cache_file", lambda folder, device: folder / "choices.json")
    made = products(None)
    made.choices.put(DECODE, Blas())
    folder = choice_table.tuned_file(tmp_path, made.traits.name)
    choice_table.save(folder, ChoiceTable({DECODE.key: SKINNY}))
    assert made.choice(DECODE) == Blas()
    made.tune([], tmp_path)
    assert made.choice(DECODE) == SKINNY


def test_what_memory_is_too_small_to_measure_keeps_its_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fastest(shape: LinearShape, *_: object) -> tuple[choice_table.Choice, float]:
        if shape.rows > 256:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Blas(), 12.5

    monkeypatch.setattr(autotune, "fastest", fastest)
    monkeypatch.setattr(choice_table, "cache_file", lambda folder, device: folder / "choices.json")
    made = products(Lt())
    with caplog.at_level(logging.WARNING):
        assert made.tune([PREFILL, DECODE], tmp_path, quick=True) == 1
    (told,) = [record.getMessage() for record in caplog.records]
    assert PREFILL.key in told
    assert "CUDA out of memory" in told
    assert PREFILL.key in made.slower["untuned_products"]
    assert made.choices.get(PREFILL) is None
    assert made.choice(PREFILL) == candidates.default_choice(PREFILL)
    assert choice_table.load(tmp_path / "choices.json").choices == {DECODE.key: Blas()}


def test_a_quick_measurement_gives_way_to_a_table_that_came_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the table's next larger bucket stands in; not where that cannot run."""
    monkeypatch.setattr(choice_table, "cache_file", lambda folder, device: folder / "choices.json")
    quick = {rows: LinearShape(rows, 6144, 4096, BF16) for rows in (40, 64, 112, 256)}
    choice_table.save(tmp_path / "choices.json", ChoiceTable({shape.key: Blas() for shape in quick.values()}))
    made = products(Lt(most=0))
    for rows, choice in ((64, SKINNY), (128, CublasLt("00" * 64, Lt.version))):
        made.choices.put(LinearShape(rows, 6144, 4096, BF16), choice)
    made.tune([], tmp_path)
    assert made.choices.choices.keys() == {f"bfloat16 6144x4096 x{rows}" for rows in (64, 112, 128, 256)}
    assert made.choice(quick[40]) == made.choice(quick[64]) == SKINNY
    assert made.choice(quick[112]) == Blas()


# ---- how a candidate is timed ----


def test_candidates_are_timed_on_one_stream_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for every stream; a thread that loads a library must not break a capture."""
    captures: list[tuple[object, str]] = []

    class Stream:
        def __init__(self, device: object) -> None: ...

        def wait_stream(self, other: object) -> None: ...

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 0.25

    class Context:
        def __init__(self, *_: object, **options: Any) -> None:
            if "capture_error_mode" in options:
                captures.append((options["stream"], options["capture_error_mode"]))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    class Graph:
        def replay(self) -> None: ...

    fake: dict[str, Any] = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": Context, "stream": Context}
    fake |= {"current_stream": Stream, "synchronize": lambda device: None}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    autotune._side_stream.cache_clear()
    try:
        device = torch.device("cuda", 0)
        assert [autotune.median_graph_us(lambda: None, device) for _ in range(3)] == [250.0] * 3
        side = autotune._side_stream(device)
    finally:
        autotune._side_stream.cache_clear()
    assert captures == [(side, "thread_local")] * 3
