"""Variants of decode attention in tables: which measured one stands in, and that the kernels take it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.inputs import DecodeAttention
from models.kernels.attention.decode_variant import DecodeShape, DecodeVariant, candidate_variants, nearest_variant
from models.kernels.traits import H200
from models.kv_group import FP8

TMA, FEW, MANY = DecodeVariant(True, 32, 3, 1), DecodeVariant(False, 64, 5, 4), DecodeVariant(False, 32, 5, 2)
SHAPE = DecodeShape(256, 4, 128, torch.bfloat16)


@pytest.mark.parametrize(
    ("measured", "pairs", "expected"),
    [
        ({}, 256, None),
        ({256: FEW}, 256, FEW),
        ({256: FEW}, 512, FEW),
        ({256: FEW}, 513, None),
        ({256: FEW}, 128, FEW),
        ({256: FEW}, 127, None),
        ({128: FEW, 512: MANY, 2048: TMA}, 320, MANY),
        ({128: FEW, 512: MANY, 2048: TMA}, 1024, TMA),  # as near to both: the larger
        ({128: FEW, 512: MANY, 2048: TMA}, 200, FEW),
    ],
)
def test_the_most_similar_number_of_pairs_stands_in(
    measured: dict[int, DecodeVariant], pairs: int, expected: DecodeVariant | None
) -> None:
    table = {dataclasses.replace(SHAPE, pairs=number).key: variant for number, variant in measured.items()}
    assert nearest_variant(table, dataclasses.replace(SHAPE, pairs=pairs)) == expected


def test_other_heads_are_another_matter() -> None:
    table = {SHAPE.key: FEW, "bfloat16 4x128 xmany": MANY, "bfloat16 4x128 x0": MANY}
    for other in ({"query_rows": 8}, {"head_dim": 64}, {"dtype": torch.float16}):
        assert nearest_variant(table, dataclasses.replace(SHAPE, **other)) is None
    assert nearest_variant(table, SHAPE) == FEW


def test_a_variant_of_the_table_is_what_runs_where_it_fits() -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.attention.decode_choice import DecodeChoice

    rows, heads, kv_heads = 64, 32, 8
    lengths = torch.ones(rows, dtype=torch.int32)
    inputs = DecodeAttention(lengths.new_zeros(rows, 16), lengths, 1, 1024)

    def launched(
        variant: DecodeVariant | None, head_dim: int = 128, *, listed: bool = True
    ) -> tuple[bool, tuple[int, int, int]]:
        shape = DecodeShape(rows * kv_heads, heads // kv_heads, head_dim, torch.bfloat16)
        choice = DecodeChoice(H200, True, {} if variant is None else {shape.key: variant}, 0)
        cache = torch.empty(2, 1, 64, kv_heads, head_dim, dtype=torch.bfloat16)
        return choice.variant(inputs, heads, cache, listed=listed)

    rule = launched(None)
    more_stages = DecodeVariant(True, 32, 4, 1)
    assert launched(more_stages) == (True, more_stages.blocks) != rule
    for variant in (FEW, MANY, DecodeVariant(False, 128, 3, 8)):
        assert launched(variant) == (False, variant.blocks)
    assert launched(DecodeVariant(False, 256, 5, 8)) == launched(None, listed=False), "it does not fit"
    assert launched(TMA, head_dim=80)[0] is False, "TMA does not take such heads"


@pytest.mark.parametrize(("rows", "fewest"), [(8, 8), (16, 4), (32, 2), (64, 1), (256, 1)])
def test_tokens_over_a_float8_cache_have_splits_for_every_multiprocessor(rows: int, fewest: int) -> None:
    """Of one warp each, unless rows may be absent; a bfloat16 cache keeps the table's."""
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.attention.decode_choice import DecodeChoice

    choice, lengths = DecodeChoice(H200, True, {}, 1 << 30), torch.ones(rows, dtype=torch.int32)
    inputs = DecodeAttention(lengths.new_zeros(rows, 64), lengths, 1, 4096)
    wide = torch.empty(2, 1, 64, 8, 128, dtype=torch.bfloat16)
    narrow = wide.to(FP8)
    assert [choice.rule(inputs, 32, cache).fewest for cache in (narrow, wide)] == [fewest, 1]
    assert choice.rule(dataclasses.replace(inputs, skip_empty=True), 32, narrow).fewest == 1
    assert choice.variant(inputs, 32, narrow) == (True, (32, 3, 1))
    assert choice.variant(inputs, 32, wide) == (True, (32, 3, 2 if rows in (32, 64) else 1))


def test_candidates_are_distinct_and_have_the_variants_in_use() -> None:
    found = candidate_variants()
    assert len(set(found)) == len(found)
    assert {TMA, FEW, MANY, DecodeVariant(False, 64, 3, 2)} <= set(found)
