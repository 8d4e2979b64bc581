"""Rehearsals before captures run one layer of each kind: which ones, and that nothing else changes. What large steps
hold meanwhile."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.layers.decoder import Decoder
from models.layers.mixer import Part
from models.row_buckets import LARGE_STEP
from parallel.comm.collectives import PendingAllReduce
from tests.models.kernels.paged_driver import PagedDriver
from tests.models.test_config import tiny
from tests.models.tiny_checkpoint import build


def called(model: Decoder) -> list[int]:
    """Numbers of the layers that a forward pass runs; every layer is replaced by one that only says so."""
    seen: list[int] = []

    class Said(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def parts(self, *rest: object) -> list[Part]:
            return [self.said]

        def said(self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None) -> tuple[Tensor, Tensor]:
            assert isinstance(x_TN, Tensor)
            seen.append(self.number)
            return x_TN, x_TN if residual_TN is None else residual_TN

    assert model._attentions  # asked of the real layers
    assert model.cache_layout
    kept, model.layers = model.layers, nn.ModuleList(Said(number) for number in range(len(model.layers)))
    try:
        fields = {"token_ids_T": torch.zeros(2, dtype=torch.int64), "logit_rows_R": None}
        inputs = type("Inputs", (), {**fields, "of_group": lambda self, number: self})()
        model._with_prefill_plan = lambda inputs, *rest: inputs  # type: ignore[method-assign]
        model._planned = lambda inputs, *rest: inputs  # type: ignore[method-assign]
        model._whole_last_layer = lambda: True  # type: ignore[method-assign]
        Decoder.forward(model, inputs, [torch.empty(0)] * len(kept))
    finally:
        model.layers = kept
    return seen


def test_one_layer_of_each_kind_and_both_ends() -> None:
    model = build(tiny(num_hidden_layers=7))
    with model.few_layers():
        assert model._one_layer_a_kind == (0, 1, 6)
        assert called(model) == [0, 1, 6]
    assert called(model) == list(range(7))


def test_layers_that_differ_in_a_number_are_of_different_kinds() -> None:
    model = build(tiny(num_hidden_layers=8))
    for number in (4, 5):
        setattr(model.layers[number].mixer, "window", 128)  # noqa: B010
    assert model._one_layer_a_kind == (0, 1, 4, 7)


@pytest.mark.parametrize("layers", [1, 2])
def test_models_without_a_middle(layers: int) -> None:
    assert build(tiny(num_hidden_layers=layers))._one_layer_a_kind == tuple(range(layers))


def test_it_ends_with_an_error_too() -> None:
    model = build(tiny(num_hidden_layers=5))
    with pytest.raises(ZeroDivisionError), model.few_layers():
        raise ZeroDivisionError
    assert called(model) == list(range(5))


def test_slices_of_a_large_step() -> None:
    from models.ops.tuned import slice_rows

    for rows in (LARGE_STEP + 1, 2560, 3072, 4608, 5000, 7168, 8192, 16384):
        size = slice_rows(rows)
        assert size <= LARGE_STEP
        assert size % 128 == 0
        assert -(-rows // size) == -(-rows // LARGE_STEP), "no more slices than needed"


def test_attention_holds_no_activation_that_was_read_for_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large step each takes 64 MiB and more of the memory that graphs share."""
    model, held = build(tiny(num_hidden_layers=3)), list[list[str]]()
    made: dict[str, weakref.ref[Tensor]] = {}

    def watch(op: str, argument: int, name: str) -> None:
        run = getattr(model.kernels, op)

        def watched(*given: Any, **named: Any) -> Any:
            held.append([name for name, tensor in made.items() if tensor() is not None])
            made[name] = weakref.ref(given[argument])
            return run(*given, **named)

        monkeypatch.setattr(model.kernels, op, watched)

    watch("rope_and_cache", 0, "qkv")
    watch("prefill_attention", 0, "q")
    driver = PagedDriver(model, 4)
    for layer in model.layers:
        add_linear = layer.mixer.norm.add_linear  # type: ignore[union-attr]

        def watched(x_TN: Tensor, *given: Any, run: Any = add_linear, **named: Any) -> Any:
            made["x"] = weakref.ref(x_TN)
            return run(x_TN, *given, **named)

        monkeypatch.setattr(layer.mixer.norm, "add_linear", watched)
    driver.generate([[1, 2, 3]], 1)
    assert held == [["x"], ["x"]] + [[]] * 4, "the first layer's x is the stream"
