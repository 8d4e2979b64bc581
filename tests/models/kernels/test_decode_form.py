"""Forms of decode attention in tables: which measured one stands in, and that the kernels take it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.kernels.attention.decode_form import DecodeForm, DecodeShape, candidate_forms, nearest_form

TMA, FEW, MANY = DecodeForm(True, 32, 3, 1), DecodeForm(False, 64, 5, 4), DecodeForm(False, 32, 5, 2)
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
    measured: dict[int, DecodeForm], pairs: int, expected: DecodeForm | None
) -> None:
    table = {dataclasses.replace(SHAPE, pairs=number).key: form for number, form in measured.items()}
    assert nearest_form(table, dataclasses.replace(SHAPE, pairs=pairs)) == expected


def test_other_heads_are_another_matter() -> None:
    table = {SHAPE.key: FEW, "bfloat16 4x128 xmany": MANY, "bfloat16 4x128 x0": MANY}
    for other in ({"query_rows": 8}, {"head_dim": 64}, {"dtype": torch.float16}):
        assert nearest_form(table, dataclasses.replace(SHAPE, **other)) is None
    assert nearest_form(table, SHAPE) == FEW


def test_candidates_are_distinct_and_have_the_forms_in_use() -> None:
    found = candidate_forms()
    assert len(set(found)) == len(found)
    assert {TMA, FEW, MANY, DecodeForm(False, 64, 3, 2)} <= set(found)
