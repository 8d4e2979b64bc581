"""Expert load: what is counted, the report's file, and the placement that is computed from it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from models.expert_load import ExpertLoad, ExpertLoadError, balanced_order, rank_tokens, read_load, start_counting
from parallel.layers.experts import ExpertSplit, held_experts
from tests.models.kernels.paged_driver import PagedDriver
from tests.models.test_experts import QWEN, load, sparse_mlp


def draws(count: int) -> list[tuple[list[int], int]]:
    """Skewed token counts of 4 to 64 experts, and a number of ranks that divides them."""
    draw = random.Random(5)
    found = []
    for _ in range(count):
        ranks = draw.choice((1, 2, 4, 8))
        experts = ranks * draw.randint(1, 8)
        found.append(([int(1000 * draw.random() ** 6) for _ in range(experts)], ranks))
    return found


@pytest.mark.parametrize(("tokens", "ranks"), draws(60))
def test_a_balanced_order_is_an_order_and_never_worse(tokens: list[int], ranks: int) -> None:
    order = balanced_order(tokens, ranks)
    assert sorted(order) == list(range(len(tokens)))
    assert order == balanced_order(list(tokens), ranks)
    fullest, before = (max(rank_tokens(tokens, o, ranks)) for o in (order, range(len(tokens))))
    assert fullest <= before
    # Every rank but the fullest had room or fewer tokens when the fullest took its last expert.
    assert fullest <= sum(tokens) / ranks + max(tokens)
    placed = [expert for rank in range(ranks) for expert in held_experts(len(tokens), rank, ranks, order)]
    assert placed == list(order)


def test_a_known_balance() -> None:
    tokens = [90, 80, 70, 60, 10, 10, 10, 10]  # in order: 300 and 40
    order = balanced_order(tokens, 2)
    assert rank_tokens(tokens, order, 2) == [170, 170]
    assert order == (0, 3, 4, 6, 1, 2, 5, 7)
    assert balanced_order([1, 1, 1, 1], 2) == (0, 1, 2, 3)
    assert balanced_order([0, 0], 1) == (0, 1)
    with pytest.raises(ValueError, match="3 experts cannot be split evenly over 2"):
        balanced_order([1, 2, 3], 2)


def test_counters_see_every_real_token_once() -> None:
    """Of prefills and of decode steps; the driver pads each decode step with one row, which does not count."""
    model = load(None, QWEN, ExpertSplit(whole=True))
    assert read_load(model).tokens == {}
    start_counting(model)
    driver = PagedDriver(model, pages=40)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    driver.generate(prompts, new_tokens=4)
    counted = read_load(model)
    assert list(counted.tokens) == [1]
    assert sum(counted.tokens[1]) == 3 * (5 + 3 + 2 * (4 - 1))
    load_E = sparse_mlp(model).load_E
    assert load_E is not None
    assert load_E.dtype == torch.int64


def test_the_report_comes_back_and_says_how_uneven_ranks_are(tmp_path: Path) -> None:
    load = ExpertLoad("Qwen3MoeForCausalLM", {1: (30, 10, 0, 0), 3: (1, 1, 1, 1), 4: (0, 0, 0, 0)})
    in_order = ExpertSplit(whole=True)
    assert load.imbalance(2, in_order) == {1: 2.0, 3: 1.0, 4: 1.0}
    assert load.imbalance(2, ExpertSplit()) == {1: 1.0, 3: 1.0, 4: 1.0}
    assert load.imbalance(2, ExpertSplit(whole=True, orders=load.orders(2))) == {1: 1.5, 3: 1.0, 4: 1.0}
    load.write(tmp_path / "load.json", 2, in_order)
    assert '"fullest_rank_over_mean": 2.0' in (tmp_path / "load.json").read_text()
    assert ExpertLoad.read(tmp_path / "load.json") == load


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2, "architecture": "A", "layers": []}',
        '{"schema": 1, "layers": []}',
        '{"schema": 1, "architecture": "A", "layers": [{"layer": 0}]}',
        '{"schema": 1, "architecture": "A", "layers": [{"layer": 0, "tokens": [1, -1]}]}',
        '{"schema": 1, "architecture": "A", "layers": [{"layer": 0, "tokens": [true]}]}',
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "load.json").write_text(text)
    with pytest.raises(ExpertLoadError, match=r"load\.json"):
        ExpertLoad.read(tmp_path / "load.json")
    with pytest.raises(ExpertLoadError, match="--expert-load wrote"):
        ExpertLoad.read(tmp_path / "absent.json")
