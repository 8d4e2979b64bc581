"""Where matrix products take slower kernels than the usual ones, the dispatcher says why. No GPU needed."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import Blas, Choice, ChoiceTable, CublasLt, LinearShape, Scaled
from models.kernels.matmul.cublaslt import CublasLtError
from models.kernels.traits import H200
from parallel.comm.quantised import Quantised
from parallel.layers.weight import Weight, fp8

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
dispatch = importlib.import_module("models.ops.tuned")
product_rows = importlib.import_module("models.ops.rows_nvidia.products")
nvidia = importlib.import_module("tests.models.kernels.nvidia_kernels")

SHAPES = [LinearShape(8, outputs, 512, torch.bfloat16) for outputs in (256, 384, 512)]


class Lt:
    """A cuBLASLt that opens, and knows no algorithm."""

    version = 130_100

    def __init__(self, device: torch.device) -> None: ...

    def algorithms(self, *shape: object, most: int) -> list[str]:
        return []


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a dispatcher without a shipped table, over a cuBLASLt that ``fails`` to open, or opens."""

    def made(fails: Exception | None = None) -> Any:
        def opened(device: torch.device) -> Lt:
            if fails is not None:
                raise fails
            return Lt(device)

        monkeypatch.setattr(dispatch, "CublasLtLinear", opened)
        monkeypatch.setattr(dispatch, "shipped_choices", lambda device: ChoiceTable())
        return dispatch.TunedProducts(torch.device("meta"), H200)

    return made


def slower(matmul: Any) -> dict[str, str]:
    """As the executor asks for it, to count it (tests/runtime/execute/test_fallbacks.py)."""
    return dict(nvidia.nvidia_kernels_on_cpu(matmul).slower_kernels)


def test_experts_that_torch_computes_are_told() -> None:
    """Tensor cores want multiples of 16; a rank's share of an expert's features is padded, the hidden size is not."""
    kernels = nvidia.nvidia_kernels_on_cpu()
    x, up, down = torch.ones(3, 24), Weight.of(torch.ones(2, 32, 24)), Weight.of(torch.ones(2, 24, 16))
    made = kernels.expert_mlp(x, up, down, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64), all_experts=2)
    assert made.shape == x.shape
    assert "a hidden size of 24" in kernels.slower_kernels["torch_experts"]


@pytest.mark.parametrize("fails", [OSError("libcublasLt.so.13: no such file"), CublasLtError("cublasLtCreate: 1")])
def test_without_cublaslt_cublas_stands_in_and_says_why(products: Any, fails: Exception) -> None:
    found = slower(products(fails))
    assert found.keys() == {"cublas_products"}
    assert str(fails) in found["cublas_products"]


def test_what_cannot_be_measured_is_told_and_what_can_is_measured(
    products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fastest(shape: LinearShape, *_: object) -> tuple[Choice, float]:
        if shape.outputs == 384:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Blas(), 3.0

    monkeypatch.setattr(dispatch.autotune, "fastest", fastest)
    matmul = products()
    assert slower(matmul) == {}
    assert matmul.tune(SHAPES, quick=True) == 2
    found = slower(matmul)
    assert found.keys() == {"untuned_products"}
    assert SHAPES[1].key in found["untuned_products"]
    assert "out of memory" in found["untuned_products"]


def test_usual_kernels_are_no_fallback(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.autotune, "fastest", lambda *_: (Blas(), 3.0))
    matmul = products()
    assert matmul.tune(SHAPES, quick=True) == 3
    assert slower(matmul) == {}


def test_cublas_in_place_of_an_algorithm_of_another_version_is_told_until_it_is_measured_anew(products: Any) -> None:
    matmul, shape = products(), SHAPES[0]
    matmul.choices.put(shape, CublasLt("00" * 64, Lt.version - 1))
    assert slower(matmul) == {}, "nobody has run it"
    assert matmul.choice(shape) == Blas()
    found = slower(matmul)
    assert found.keys() == {"cublas_products"}
    assert shape.key in found["cublas_products"]
    matmul.choose(shape, Blas())
    assert matmul.choice(shape) == Blas()
    assert slower(matmul) == {}


def test_a_rank_runs_what_rank_0_measured_also_where_it_has_run_another_kernel(products: Any) -> None:
    matmul, shape, told = products(), SHAPES[0], ChoiceTable()
    assert matmul.choice(shape) != Blas()
    told.put(shape, Blas())
    assert matmul.tune_seen(None, lambda make: told.to_json()) == 0
    assert matmul.choice(shape) == Blas()


def test_what_a_start_measured_does_not_overrule_a_larger_bucket_of_the_table(
    products: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    matmul, shape, cached = products(), replace(SHAPES[0], rows=24), ChoiceTable()
    cached.put(shape, matmul.choice(shape))
    matmul.choose(replace(shape, rows=32), Blas())
    monkeypatch.setattr(dispatch.choice_table, "cache_file", lambda folder, device: tmp_path / "cache.json")
    choice_table.save(tmp_path / "cache.json", cached)
    assert matmul.choice(shape) == Blas(), "it stands in"
    matmul.tune([], tmp_path)
    assert matmul.choice(shape) == Blas()


def test_what_runs_fp8_serves_matrices_of_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of one choice share it, so the group of activations comes from the matrix."""
    asked: list[int] = []

    def quantise(x_MK: torch.Tensor, group: int, pdl: bool, *, cap: float | None) -> Quantised:
        asked.append(group)
        tokens, inner = x_MK.shape
        made = Quantised.empty(tokens, inner, group, x_MK.dtype, x_MK.device)
        return replace(made, codes=torch.zeros(made.codes.shape))

    monkeypatch.setattr(product_rows.codes, "quantise", quantise)
    monkeypatch.setattr(torch, "_scaled_mm", lambda x, w, *scales, out_dtype: (x @ w.float()).to(out_dtype))
    shape = LinearShape(3, 32, 64, torch.bfloat16, stored=fp8(1, 0))
    run = product_rows.ROWS[Scaled].bind(SimpleNamespace(pdl=False), shape, Scaled())
    for inner in (64, 128):
        weight = Weight(torch.zeros(32, inner, dtype=torch.float8_e4m3fn), fp8(1, 0), None, torch.ones(32, 1))
        assert run(torch.zeros(3, inner, dtype=torch.bfloat16), weight)[0].shape == (3, 32)
    assert asked == [64, 128]
