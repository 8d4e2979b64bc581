"""The experts that a step reads, counted over a tiny sparse model on a CPU."""

from __future__ import annotations

from models.expert_load import start_counting
from tests.bench.expert_reads import distinct, read_by_step
from tests.runtime.engine.rig import rig
from tests.runtime.engine.test_experts import EXPERTS


def test_experts_of_ranks_are_told_apart() -> None:
    counts = {0: [2, 0, 1, 0, 0, 0, 0, 4], 3: [0, 0, 0, 0, 1, 1, 1, 1]}
    assert distinct(counts, 1) == (3.5, 3.5)
    assert distinct(counts, 2) == (3.5, 3.0), "two of the first rank in one layer, four of the second in the other"


def test_one_steps_choices_are_what_two_counts_differ_by() -> None:
    with rig(depth=0, shape=EXPERTS, rows=4, max_model_len=128) as engine:
        start_counting(engine.executor._model)
        for rows in (1, 4):
            read = read_by_step(engine, rows, prompt=9, steps=3)
            assert len(read) == 3
            for counts in read:
                assert counts.keys() == {1}, "every other layer is sparse"
                for tokens in counts.values():
                    assert sum(tokens) == rows * 3, "each token chooses three"
                    assert max(tokens) <= rows
                    assert distinct(counts, 1)[0] >= 3
