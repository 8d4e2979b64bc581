"""Every bucket of both ladders has a kernel that can run it, by the tables that are shipped. No GPU needed."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.tune.shapes import Asked, RankShare, asked_products, buckets_of
from models.config import ModelConfig
from models.kernels.matmul import choice_table
from models.kernels.matmul.candidates import MOST_GEMV_ROWS
from models.kernels.matmul.choice_table import Blas, Choice, ChoiceTable, CublasLt, Gemv, LinearShape, Skinny, Wide
from models.kernels.matmul.cublaslt import Linear
from models.kernels.traits import H200, DeviceTraits

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
dispatch = importlib.import_module("models.kernels.matmul.dispatch")

SHAPES = Path(__file__).parents[3] / "models" / "shapes"
SHIPPED = sorted(choice_table.SHIPPED_CHOICES.glob("*.json"))
MODELS = [("qwen3-8b", 1), ("qwen3-8b", 2), ("qwen3-0.6b", 1), ("qwen3-30b-a3b", 1), ("qwen3-30b-a3b", 2)]
LATEST = 130_100  # of cuBLASLt, that of torch 2.11


class Lt:
    """cuBLASLt of one version; ``flexible``: algorithms run other numbers of rows than they were found for."""

    def __init__(self, version: int, flexible: bool) -> None:
        self.version, self.flexible = version, flexible

    def can_run(self, *shape: object) -> bool:
        return self.flexible


def products(table: ChoiceTable, gpu: DeviceTraits, lt: Lt) -> Any:
    made = object.__new__(dispatch.MatmulDispatch)
    made.device, made.traits, made.pdl = torch.device("meta"), gpu, gpu.dependent_launch
    made.choices, made._resolved, made._lt = table, {}, lt
    made._partial = torch.empty(dispatch.PARTIAL_BYTES // 4, device="meta")
    return made


@functools.cache
def asked(model: str, ranks: int) -> tuple[Asked, ...]:
    share = RankShare.of(ModelConfig.from_folder(SHAPES / model), ranks)
    return tuple(asked_products(share, buckets_of(256, 8192), 256))


def misfits(shape: LinearShape, choice: Choice, lt: Lt) -> str | None:
    """Why ``choice`` cannot run ``shape``, by what the kernels' own docstrings ask for."""
    outputs = shape.outputs // (2 if shape.gate_up else 1)
    fits = True
    match choice:
        case Gemv():
            fits = shape.rows <= MOST_GEMV_ROWS and outputs % choice.block_o == 0 and shape.inner % choice.chunk == 0
        case Skinny():
            fits = shape.outputs % choice.block_o == 0 and shape.inner % (choice.block_k * choice.split) == 0
            fits &= not choice.fold or shape.normed
        case Wide():
            fits = shape.outputs % choice.block_o == 0 and shape.inner % (choice.block_k * choice.split) == 0
            fits &= shape.rows <= choice.block_m
        case CublasLt():
            fits = choice.version == lt.version
    return None if fits else f"{shape.key}: {choice}"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize(("model", "ranks"), MODELS)
@pytest.mark.parametrize("lt", [Lt(LATEST, True), Lt(LATEST, False), Lt(1, True)], ids=["latest", "strict", "other"])
def test_every_bucket_of_both_ladders_resolves_to_a_kernel_that_fits(
    path: Path, model: str, ranks: int, lt: Lt
) -> None:
    table = choice_table.load(path)
    assert table.gpu is not None
    made = products(table, table.gpu, lt)
    seen = set()
    for step in asked(model, ranks):
        for shape in (*step.layers, *((step.head,) if step.head is not None else ())):
            choice = made.choice(shape)
            assert misfits(shape, choice, lt) is None
            own = table.get(shape)
            if isinstance(choice, CublasLt) and choice != own:
                assert lt.flexible, "an algorithm of other rows"
            if own is not None and not isinstance(own, CublasLt):
                assert choice == own
            seen.add(step.rows)
    assert sorted(seen) == list(buckets_of(256, 8192))


def test_decode_buckets_between_powers_of_two_run_what_was_measured() -> None:
    """40, 48, 192 and 224 rows of 8B fell back to cuBLAS where the next power of two had an algorithm of cuBLASLt."""
    table = choice_table.load(choice_table.SHIPPED_CHOICES / "nvidia-h200.json")
    assert table.gpu is not None
    made = products(table, table.gpu, Lt(LATEST, True))
    for step in asked("qwen3-8b", 1):
        for shape in step.layers if step.rows <= 256 else ():
            measured = [choice for _, choice in table.near(shape)]
            assert measured, shape.key
            assert made.choice(shape) == measured[0]


def test_an_algorithm_of_the_next_power_of_two_serves_where_the_library_lets_it() -> None:
    shape, algorithm = LinearShape(40, 6144, 4096, torch.bfloat16, normed=True), CublasLt("00" * 64, LATEST)
    table = ChoiceTable({"bfloat16 6144x4096 normed x64": algorithm})
    assert products(table, H200, Lt(LATEST, True)).choice(shape) == algorithm
    assert products(table, H200, Lt(LATEST, False)).choice(shape) == Blas()


@pytest.mark.parametrize(
    ("status", "state", "workspace", "runs"),
    [(0, 0, 64, True), (7, 0, 64, False), (0, 15, 64, False), (0, 0, 65, False)],
)
def test_cublaslts_check_is_asked_about_the_real_rows(
    status: int, state: int, workspace: int, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library is called with, and how its answer is read; the library itself needs a GPU."""
    shapes = []

    class Library:
        def cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:
            assert bytes(arguments[6]._obj).hex() == "ab" * 64
            arguments[7]._obj.state, arguments[7]._obj.workspace = state, workspace
            return status

    def problem(*shape: Any) -> Any:
        shapes.append(shape)
        return SimpleNamespace(operation=0, weight=0, inputs=0, outputs=0)

    linear: Any = object.__new__(Linear)
    linear._library, linear._handle, linear._workspace = Library(), None, torch.empty(64, dtype=torch.uint8)
    monkeypatch.setattr(linear, "_problem", problem)
    assert linear.can_run(40, 6144, 4096, torch.bfloat16, "ab" * 64) is runs
    assert shapes == [(40, 6144, 4096, torch.bfloat16)]
