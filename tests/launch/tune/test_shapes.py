"""Which products are measured: those that a rank of the model asks for, whatever its family."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from launch.tune.shapes import RankShare, asked_attention, asked_products, buckets_of, layers_enough
from models.kernels.attention.decode_variant import DecodeShape
from models.kernels.matmul.choice_table import LinearShape
from models.registry import config_from_folder
from parallel.comm.symmetric_all_reduce import SizeLimits

SHAPES = Path(__file__).parents[3] / "models" / "shapes"
BF16 = torch.bfloat16


def share(model: str, ranks: int = 1, *, whole_experts: bool = False) -> RankShare:
    return RankShare.of(config_from_folder(SHAPES / model), ranks, whole_experts=whole_experts)


def test_a_dense_models_products() -> None:
    decode, prompts = asked_products(share("qwen3-8b"), (40, 320), 256)
    assert decode.layers == (
        LinearShape(40, 24576, 4096, BF16, normed=True, gate_up=True),
        LinearShape(40, 4096, 12288, BF16),
        LinearShape(40, 6144, 4096, BF16, normed=True),
        LinearShape(40, 4096, 4096, BF16),
    )
    assert decode.head == LinearShape(40, 151936, 4096, BF16)
    assert [shape.rows for shape in prompts.layers] == [320] * 4
    assert prompts.head is None, "the head runs on the rows that draw, at most those of a decode step"


def test_fp8_products_have_their_scheme_in_the_key() -> None:
    (decode,) = asked_products(share("qwen3-8b-fp8"), (32,), 256)
    assert {shape.block for shape in decode.layers} == {(128, 128)}
    assert decode.layers[0].key == "bfloat16 24576x4096 normed gate_up fp8_128x128 x32"
    assert decode.head == LinearShape(32, 151936, 4096, BF16)


@pytest.mark.parametrize(
    ("limits", "normed"), [(SizeLimits(4 << 20, 0), False), (SizeLimits(0, 0), True), (SizeLimits(0, 4 << 20), False)]
)
def test_a_rank_of_two_has_no_norm_in_front_where_the_all_reduce_takes_it_along(
    limits: SizeLimits, normed: bool
) -> None:
    two = dataclasses.replace(share("qwen3-8b", 2), limits=limits)
    (asked,) = asked_products(two, (8,), 256)
    gate_up, _, qkv, _ = asked.layers
    assert gate_up == LinearShape(8, 12288, 4096, BF16, normed=normed, gate_up=True)
    assert qkv == LinearShape(8, 3072, 4096, BF16, normed=normed)
    assert asked.head == LinearShape(8, 75968, 4096, BF16)


def test_large_all_reduces_leave_the_norm_to_the_product() -> None:
    small, large = asked_products(share("qwen3-8b", 8), (256, 512), 256)
    assert [shape.normed for shape in small.layers] == [False] * 4
    assert [shape.normed for shape in large.layers] == [True, False, True, False]


def test_a_sparse_models_products() -> None:
    (asked,) = asked_products(share("qwen3-30b-a3b", 2, whole_experts=True), (1,), 256)
    assert {(shape.outputs, shape.inner) for shape in asked.layers} == {(2560, 2048), (2048, 2048), (128, 2048)}


def test_first_layers_may_have_experts_and_no_attention() -> None:
    (asked,) = asked_products(share("nemotron-3-nano-30b-a3b"), (1,), 256)
    inner = {(10304, 2688), (2688, 4096), (4608, 2688)}  # of Mamba-2, of both kinds of mixers, of attention
    assert inner <= {(shape.outputs, shape.inner) for shape in asked.layers}


def test_layers_are_as_many_as_it_takes_to_see_every_product() -> None:
    dense = share("qwen3-8b")
    assert layers_enough(dense) == 4
    sparse = share("qwen3-30b-a3b")
    experts = sparse.config.experts
    assert experts is not None
    late = dataclasses.replace(experts, layers=tuple(range(11, 48)))
    mixed = dataclasses.replace(sparse, config=dataclasses.replace(sparse.config, experts=late))
    assert layers_enough(mixed) == 16
    assert mixed.cut(12).config.experts == dataclasses.replace(late, layers=(11,))
    (asked,) = asked_products(mixed, (8,), 256)
    assert (128, 2048) in {(shape.outputs, shape.inner) for shape in asked.layers}
    assert any(shape.gate_up for shape in asked.layers)


@pytest.mark.parametrize(("ranks", "pairs"), [(1, 256), (2, 128), (8, 32)])
def test_attention_is_that_of_a_ranks_heads(ranks: int, pairs: int) -> None:
    assert asked_attention(share("qwen3-8b", ranks), 32) == DecodeShape(pairs, 4, 128, BF16)


def test_a_model_that_cannot_be_split_so_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be split over 3 tensor-parallel ranks"):
        share("qwen3-8b", 3)


def test_buckets_are_those_of_both_ladders() -> None:
    assert {1, 40, 192, 256, 320, 448, 1152, 8192} <= set(buckets_of(256, 8192))
    assert max(buckets_of(16, 100)) == 100
