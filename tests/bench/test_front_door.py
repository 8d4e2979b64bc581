"""The comparison of engine and server: its rules, its table, and a tokenizer for shapes that have none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.frontend.tokenizer import Tokenizer
from tests.bench.front_door import compared, invented_tokenizer, model_folder, table

FIGURES = {
    "output_throughput": 1000.0,
    "p99_itl_ms": 10.0,
    "median_itl_ms": 8.0,
    "median_ttft_ms": 50.0,
    "p99_ttft_ms": 90.0,
    "failed": 0,
}


@pytest.mark.parametrize(
    ("outside", "broken"),
    [
        ({"output_throughput": 970.0, "p99_itl_ms": 11.5, "median_ttft_ms": 52.0}, []),
        ({"output_throughput": 969.0}, ["rate"]),
        ({"p99_itl_ms": 11.6}, ["itl"]),
        ({"median_ttft_ms": 52.1}, ["ttft"]),
        ({"failed": 1}, ["answered"]),
    ],
)
def test_each_rule_is_held_against_its_bound(outside: dict[str, float], broken: list[str]) -> None:
    row = compared(FIGURES, FIGURES | outside)
    assert [name for name, holds in row["holds"].items() if not holds] == broken
    told = {"model": "m", "num_prompts": 3, "points": [{"concurrency": 16, "api_processes": 1, **row}]}
    shown = table(told | {"us_per_event{1}": {"rank 0": 1.5}}).splitlines()
    assert shown[3].endswith(f"| {', '.join(f'not {name}' for name in broken) or 'all'} |")
    assert shown[-1] == "us_per_event{1}: rank 0 1.5"


@pytest.mark.slow
def test_a_shape_gets_a_tokenizer_of_its_size(tmp_path: Path) -> None:
    folder = model_folder("qwen3-0.6b", tmp_path)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == size
    assert tokenizer.decode(tokenizer.encode("é x")) == "é x"
    assert all(tokenizer.decode([token]) for token in (300, size // 2, size - 1))


def test_invented_tokenizers_are_the_same_every_time() -> None:
    assert invented_tokenizer(700) == invented_tokenizer(700)
    assert len(invented_tokenizer(700)["model"]["vocab"]) == 700
