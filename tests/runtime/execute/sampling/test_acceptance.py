"""Which tokens of a window count: against a plain loop over one row at a time."""

from __future__ import annotations

import random

import pytest
import torch

from runtime.execute.sampling.acceptance import accept
from runtime.execute.sampling.penalties import SeenTokens, seen_before
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.slots.feature import RowView
from runtime.schedule.request import FinishReason

NONE, STOP, LENGTH, ERROR = (int(FinishReason[name]) for name in ("NONE", "STOP", "LENGTH", "ERROR"))


def walk(tokens: list[int], counts: list[int], finish: list[int], proposals: list[int], limit: int) -> tuple[int, int]:
    """(tokens gained, why it ended), one draw after the other."""
    gained = 0
    for j in range(min(len(tokens), limit)):
        if j and (proposals[j - 1] != tokens[j - 1] or finish[j - 1] != NONE):
            break
        gained += counts[j]
        if finish[j] != NONE:
            return gained, finish[j]
    return gained, NONE


@pytest.mark.parametrize("width", [2, 3, 8, 32])
def test_acceptance_is_the_walk_of_each_row(width: int) -> None:
    draw, rows = random.Random(width), 400
    tokens = [[draw.randrange(2) for _ in range(width)] for _ in range(rows)]
    finish = [[draw.choice((NONE,) * 3 * width + (STOP, LENGTH, ERROR)) for _ in range(width)] for _ in range(rows)]
    counts = [[int(why != ERROR) for why in row] for row in finish]
    for dead in range(0, rows, 17):  # ghosts: nothing counts, nothing ends
        counts[dead], finish[dead] = [0] * width, [NONE] * width
    proposals = [
        [token if draw.random() < 0.9 else 1 - token for token in row[:-1]] for row in tokens
    ]  # most of them are right, so that long runs occur
    limits = [draw.randrange(width + 1) for _ in range(rows)]
    flat = [torch.tensor(table).view(-1) for table in (tokens, counts, finish)]
    verdict = Verdict(flat[1].to(torch.int32), flat[2].to(torch.int32))
    for limit_B in (None, torch.tensor(limits)):
        got = accept(Draw(flat[0], flat[1] > 0), verdict, torch.tensor(proposals), limit_B)
        wanted = [
            walk(tokens[i], counts[i], finish[i], proposals[i], width if limit_B is None else limits[i])
            for i in range(rows)
        ]
        assert list(zip(got.count_B.tolist(), got.finish_B.tolist(), strict=True)) == wanted
        assert got.tokens_BW.tolist() == tokens
    assert max(count for count, _ in wanted) > width // 2


def test_a_proposal_is_seen_by_the_tokens_behind_it_and_by_no_other() -> None:
    counts = torch.tensor([[0, 2, 0, 0], [1, 0, 0, 5]], dtype=torch.int16)
    prompt = torch.tensor([[True, False, False, False], [False, False, True, False]])
    view = RowView(torch.tensor([1, 2]), torch.tensor([[0, 3, 1], [0, 2, 2]]), width=3)
    seen = seen_before(SeenTokens(counts, prompt), view)
    assert seen.counts.tolist() == [
        [0, 2, 0, 0],
        [0, 2, 0, 1],
        [0, 3, 0, 1],
        [1, 0, 0, 5],
        [1, 0, 1, 5],
        [1, 0, 2, 5],
    ]
    assert seen.prompt.tolist() == [prompt[0].tolist()] * 3 + [prompt[1].tolist()] * 3
    assert counts.tolist() == [[0, 2, 0, 0], [1, 0, 0, 5]], "the tables themselves are left alone"
