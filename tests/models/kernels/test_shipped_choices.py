"""Every bucket of both ladders has a kernel that can run it, by the tables that are shipped. No GPU needed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.tune.shapes import Asked, RankShare, asked_products, buckets_of
from models.kernels.matmul import choice_table
from models.kernels.matmul.candidates import MOST_GEMV_ROWS
from models.kernels.matmul.choice_table import (
    Blas,
    Choice,
    ChoiceTable,
    CublasLt,
    Gemv,
    LinearShape,
    Skinny,
    Warpgroup,
    Wide,
)
from models.kernels.matmul.cublaslt import Linear
from models.kernels.traits import H200, DeviceTraits
from models.registry import config_from_folder
from models.row_buckets import decode_ladder, every_bucket
from parallel.layers.weight import int4, nvfp4
from tests.selection import covering

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
dispatch = importlib.import_module("models.ops.tuned")

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
    made = object.__new__(dispatch.TunedProducts)
    made.device, made.traits, made.pdl = torch.device("meta"), gpu, gpu.dependent_launch
    made.choices, made._resolved, made._lt, made._slower = table, {}, lt, {}
    made._runs = {}
    made._partial = torch.empty(dispatch.PARTIAL_BYTES // 4, device="meta")
    return made


@functools.cache
def asked(model: str, ranks: int) -> tuple[Asked, ...]:
    share = RankShare.of(config_from_folder(SHAPES / model), ranks)
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


LTS = {"latest": Lt(LATEST, True), "strict": Lt(LATEST, False), "other": Lt(1, True)}


@pytest.mark.parametrize(("path", "of_model", "version"), covering(SHIPPED, MODELS, tuple(LTS)))
def test_every_bucket_of_both_ladders_resolves_to_a_kernel_that_fits(
    path: Path, of_model: tuple[str, int], version: str
) -> None:
    (model, ranks), lt = of_model, LTS[version]
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


def shipped(path: Path) -> dict[str, dict[int, Choice]]:
    """As the file has them, without a table's own rules: product -> rows -> choice."""
    held: dict[str, dict[int, Choice]] = {}
    for key, entry in json.loads(path.read_text())["choices"].items():
        product, _, rows = key.rpartition(" x")
        held.setdefault(product, {})[int(rows)] = choice_table.choice_from_json(entry)
    return held


WIDE_BUCKETS = [rows for rows in sorted({*every_bucket(256, 8192), *decode_ladder(2048)}) if rows > 256]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("lt", LTS.values(), ids=LTS)
def test_beyond_256_rows_a_bucket_has_what_was_measured_for_it_or_cublas(path: Path, lt: Lt) -> None:
    """What was measured, for it or for at most a quarter more rows, and runs here; never what is further away."""
    table = choice_table.load(path)
    assert table.gpu is not None
    made, used = products(table, table.gpu, lt), 0
    assert {320, 384, 448, 512, 576, 640, 1152, 8192} <= {*WIDE_BUCKETS}
    for product, measured in shipped(path).items():
        for rows in WIDE_BUCKETS:
            shape = LinearShape.from_key(f"{product} x{rows}")
            assert shape.rows == rows, "no other bucket's"
            if shape.block is not None:
                continue  # cuBLAS has none of FP8 weights
            near = (measured[n] for n in sorted(measured) if rows <= n <= rows * 1.25)
            runs = (
                one for one in near if misfits(shape, one, lt) is None and (lt.flexible or one == measured.get(rows))
            )
            expected = next(runs, None)
            used += expected is not None
            assert made.choice(shape) == (expected or Blas()), shape.key
            if lt.flexible:
                assert made.choice(dataclasses.replace(shape, rows=rows - 1)) == (expected or Blas()), shape.key
    assert (used > 0) is any(rows > 256 for measured in shipped(path).values() for rows in measured)


@pytest.mark.parametrize("measured", [(320, 384, 448, 512, 640, 1024), (512, 1024), ()])
def test_beyond_256_rows_no_power_of_two_is_the_key(measured: tuple[int, ...]) -> None:
    """Of a table that `launch tune` made, each bucket has its own entry; 512 rows' tiles are none for 320."""
    keys = {rows: f"bfloat16 6144x4096 x{rows}" for rows in WIDE_BUCKETS}
    skinny = {rows: Skinny(8, 64, 128, 1, rows, 4, 128) for rows in measured}  # told apart by their stages
    made = products(ChoiceTable({keys[rows]: choice for rows, choice in skinny.items()}), H200, Lt(LATEST, True))
    found = {rows: made.choice(LinearShape(rows, 6144, 4096, torch.bfloat16)) for rows in WIDE_BUCKETS}
    assert {rows: found[rows] for rows in measured} == skinny
    assert found[320] == skinny.get(320, Blas())
    assert found[416] == skinny.get(448, skinny.get(512, Blas()))
    assert [found[rows] for rows in (1152, 2048, 8192)] == [Blas()] * 3


def test_four_bit_weights_of_8b_take_a_warpgroup_from_5_to_32_rows_and_start_ups_try_one_for_others() -> None:
    table = choice_table.load(choice_table.SHIPPED_CHOICES / "nvidia-h200.json")
    made, asked = products(table, H200, Lt(LATEST, True)), [key for key in table.choices if "int4_1x128" in key]
    assert len(asked) == 16
    for shape in map(LinearShape.from_key, asked):
        assert made.choice(shape) == table.get(shape)
        for rows in (5, 8, 16, 24, 32):
            assert isinstance(made.choice(dataclasses.replace(shape, rows=rows)), Warpgroup)
    for form, rows in itertools.product((int4(128, torch.float16), nvfp4()), (1, 2, 32, 33)):
        tried = made._quickly(LinearShape(rows, 3072, 2880, torch.bfloat16, stored=form))
        assert isinstance(tried[0], Warpgroup) == (1 < rows <= 32)
        assert len({type(choice) for choice in tried}) == 2 + (1 < rows <= 32)
    many = LinearShape(8, 64 * (dispatch.skinny.COUNTERS + 1), 512, torch.bfloat16, stored=int4(128, torch.float16))
    assert [made.can_run(many, Warpgroup(split, 2)) for split in (1, 2)] == [True, False], "only parts are counted"


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
