"""Figures of speed on the front page and in docs/measurements.md are rows of docs/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULE = ("model", "precision", "tp", "batch", "tpot_ms", "commit", "command")
METRICS = {
    "output tokens/s": "tok_s",
    "p99 inter-token latency, ms": "p99_itl_ms",
    "time per output token, ms": "tpot_ms",
}
BATCHES = (1, 8, 32, 128, 256)
Row = dict[str, Any]


def recorded() -> list[Row]:
    files = sorted((ROOT / "docs/results").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def claims(page: str) -> list[tuple[str, str, str, str, str]]:
    """(load, metric, ours, vLLM's, ratio) of each row of the table under "Speed"."""
    section = page.partition("\n## Speed\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| (served|fixed)", line)]
    return [(load, metric, ours, theirs, ratio) for load, metric, ours, theirs, ratio in cells]


def unsupported(page: str, rows: list[Row]) -> list[str]:
    """Claims that no two rows of the commit and day that the page names give."""
    commit = re.findall(r"Lockstride `(\w+)`", page)[0]
    days = {kind.lower(): day for kind, day in re.findall(r"\*(Served|Fixed)[^*]*\*\s\(([\d-]+)\)", page)}
    found = []
    for load, metric, *figures, ratio in claims(page):
        kind, batch = load.partition(" ")[0].strip(","), int(re.findall(r"\d+", load)[0])
        here = {"model": "qwen3-8b", "batch": batch, "date": days[kind]}
        here["kind"] = "serve" if kind == "served" else "latency"
        same = [row for row in rows if here.items() <= row.items()]
        ours = [row[METRICS[metric]] for row in same if (row["framework"], row["commit"]) == ("lockstride", commit)]
        theirs = [row[METRICS[metric]] for row in same if row["framework"] == "vllm"]
        a, b = (float(figure.replace(",", "")) for figure in figures)
        if ours != [a] or theirs != [b] or f"{max(a, b) / min(a, b):.2f}" != ratio:
            found.append(f"{load}, {metric}")
    return found


def test_each_claim_of_the_front_page_is_recorded() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(claims(page)) >= 6
    assert unsupported(page, recorded()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [("7,420", "7,421"), ("35.0", "36.0"), ("1.27 |", "1.28 |"), ("`3b59eff8`", "`3b59eff9`"), ("-11-29", "-11-28")],
)
def test_a_changed_claim_is_noticed(old: str, new: str) -> None:
    page = (ROOT / "README.md").read_text()
    assert old in page
    assert unsupported(page.replace(old, new, 1), recorded()) != []


def mismatches(page: str, rows: list[Row]) -> list[str]:
    """Cells of the first two tables of docs/measurements.md that no recorded row gives, as "first cell, column"."""
    found = []
    for line in re.findall(r"^\| qwen.*|^\| nemotron.*", page, re.MULTILINE):
        who, precision, gpus, *cells, commits = line.strip("| ").split(" | ")
        here = {"model": who.partition(",")[0], "precision": precision, "tp": int(gpus.split()[0])}
        here["framework"] = "vllm" if "vLLM" in who else "lockstride"
        same = [row for row in rows if here.items() <= row.items() and row["commit"] in commits]
        same = [row for row in same if ("H100" in row["hw"]) == ("H100" in gpus)]
        for column, (row_of, name, cell) in enumerate(wanted(cells)):
            shown = [row[name] for row in same if row_of.items() <= row.items()]
            if cell != "-" and float(cell.replace(",", "")) not in {round(value, 3) for value in shown}:
                found.append(f"{who}, {column}")
    return found


def wanted(cells: list[str]) -> list[tuple[Row, str, str]]:
    """What a cell is of, the name of its figure, its text: five batches of the first table, or a load of the second."""
    if len(cells) == 5:
        return [({"kind": "latency", "batch": n}, "tpot_ms", cell) for n, cell in zip(BATCHES, cells, strict=True)]
    load, *figures = cells
    most = int(load.rpartition(" ")[2]) if load != "at once" else None
    prompts = {"loop": {"num_prompts": 384}, "at": {"num_prompts": 1024}}.get(load.split()[0].strip(","), {})
    return [
        ({"kind": "serve", "max_concurrency": most, **prompts}, name, cell)
        for name, cell in zip(("tok_s", "median_ttft_ms", "p99_itl_ms"), figures, strict=True)
    ]


def test_each_figure_of_the_measurements_is_recorded() -> None:
    page = (ROOT / "docs/measurements.md").read_text()
    assert mismatches(page, recorded()) == []
    for old, new in (
        ("| 4.073 |", "| 4.074 |"),
        ("| 9,385 |", "| 9,386 |"),
        ("37,196", "37,195"),
        ("ca5617c", "ca5617d"),
    ):
        assert mismatches(page.replace(old, new, 1), recorded()) != [], old


def test_a_recorded_figure_says_how_it_was_made() -> None:
    assert [row for row in recorded() if not all(name in row for name in RULE)] == []
    assert [row for row in recorded() if not (row["commit"] and row["command"])] == []
