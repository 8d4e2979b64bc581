"""Chunks cut into pieces on the device, against a plain loop: random steps of rows that decode, chunks and padding."""

from __future__ import annotations

import random

import pytest
import torch

from models.inputs import PIECE
from runtime.execute.staging import Chunks
from runtime.execute.step.gather import Packed, pieces_of

MOST, PAGES = 16, 5


@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_those_of_a_plain_loop(seed: int) -> None:
    draw = random.Random(seed)
    decoding = draw.randrange(6)
    chunks = [(draw.randrange(3000), draw.randint(1, 40)) for _ in range(draw.randrange(1, 5))]
    rows = decoding + len(chunks)
    counts = [1] * decoding + [count for _, count in chunks]
    ends = [sum(counts[: row + 1]) for row in range(rows)]
    tokens, bucket_rows = ends[-1] + draw.randrange(9), rows + draw.randrange(4)
    positions = [draw.randrange(3000) for _ in range(decoding)]
    positions += [start + i for start, count in chunks for i in range(count)]
    forks = draw.randrange(min(2, bucket_rows - rows) + 1)  # answers that share a chunk's last token, and have none
    shared = [ends[draw.randrange(decoding, rows)] - 1 for _ in range(forks)]
    pad = [0] * (bucket_rows - rows - forks)
    wide = torch.zeros(tokens, dtype=torch.int64)
    slots_R = torch.tensor([*range(1, rows + forks + 1), *pad])
    staged = Chunks(
        wide, wide, wide, slots_R, slots_R,
        torch.tensor([end - 1 for end in ends] + shared + pad),
        torch.tensor([1] * decoding + [0] * (len(chunks) + forks) + pad),
    )  # fmt: skip
    positions_T = torch.tensor(positions + [0] * (tokens - ends[-1]))
    packed = Packed(wide, positions_T, wide, torch.zeros(bucket_rows), torch.zeros(bucket_rows))
    table = torch.arange(bucket_rows * PAGES, dtype=torch.int32).view(bucket_rows, PAGES)

    expected = []
    for row in range(decoding, rows):
        start, count = chunks[row - decoding]
        for offset in range(0, count, PIECE):
            new = min(PIECE, count - offset)
            expected.append((row, ends[row] - count + offset, new, start + offset + new))
    found = pieces_of(staged, packed, table, MOST, 4096)
    live = min(MOST, len(expected))
    assert found.starts_B is not None
    assert found.queries_B is not None
    assert found.starts_B[:live].tolist() == [start for _, start, _, _ in expected][:MOST]
    assert found.queries_B[:live].tolist() == [new for _, _, new, _ in expected][:MOST]
    assert found.kv_lengths_B[:live].tolist() == [known for _, _, _, known in expected][:MOST]
    assert torch.equal(found.page_table_BP[:live], table[[row for row, _, _, _ in expected][:MOST]])
    assert not found.kv_lengths_B[live:].any()
    assert not found.queries_B[live:].any()
