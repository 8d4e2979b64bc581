"""The pictures of docs/measurements.md: which rows stand with which peers, and that recorded figures are today's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launch.bench.point import ServePoint
from tests.launch.sweep.report.serve_points import serve_point
from tests.tools import plots
from tests.tools.plots import DOCS, Row, at_once, closed_loops, is_model, panels, read_rows

PEERS = json.loads((DOCS / "peers.json").read_text())
MIXED = PEERS["mixed_load"]


def latency(batch: int, tpot_ms: float | None, **more: Any) -> dict[str, Any]:
    spread = {"tpot_ms_min": tpot_ms, "tpot_ms_max": tpot_ms}
    common = {"hw": "H", "kind": "latency", "model": "qwen3-8b", "tp": 1, "roofline_floor_ms": 2.0, "refused": None}
    return {**common, **spread, "batch": batch, "tpot_ms": tpot_ms, **more}


def loads(*points: ServePoint) -> list[Row]:
    return [asdict(point) for point in points]


def measured() -> list[Row]:
    points = [serve_point(None, 9000.0), serve_point(None, 11_500.0)]
    points += [serve_point(None, 13_000.0, model="qwen3-30b-a3b", tp=2, ep=2)]
    return loads(*points, *(serve_point(most, rate) for most, rate in ((16, 3100.0), (64, 6900.0), (256, 9300.0))))


def test_rows_without_a_rate_are_left_out_and_the_last_of_a_batch_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("".join(json.dumps(row) + "\n" for row in (latency(1, 9.0), latency(8, 6.0))))
    rows = (latency(1, 5.0), latency(8, None), latency(8, 7.0, refused="not full"), latency(8, 1.0, kind="throughput"))
    second.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (panel,) = panels(read_rows([first, second]), [])
    assert {batch: row["tpot_ms"] for batch, row in panel.ours.items()} == {1: 5.0, 8: 6.0}


@pytest.mark.parametrize("other", [{"speculation": "mtp"}, {"input_len": 8192}, {"precision": "float32"}])
def test_rows_that_were_not_measured_alike_are_no_line(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="qwen3-8b, 1 x H: one line of"):
        panels([latency(1, 5.0), latency(8, 6.0, **other)], [])


def test_peers_stand_with_the_same_model_and_gpus_and_panels_by_peers_gpus_and_floor() -> None:
    one, two, small = ({"model": model, "tp": tp} for model, tp in (("8B", 1), ("8B", 2), ("0.6B", 1)))
    given = [("8b", 2, 2.0), ("32b", 8, 3.0), ("8b", 8, 1.0), ("8b", 4, 1.0), ("8b", 1, 4.0)]
    rows = [latency(1, 5.0, model=f"qwen3-{model}", tp=tp, roofline_floor_ms=floor) for model, tp, floor in given]
    for files in (rows, rows[::-1]):
        drawn = panels(files, [one, two, small])
        assert [panel.title.removeprefix("qwen3-") for panel in drawn] == [
            f"{model}, {tp} x H" for model, tp in (("8b", 1), ("8b", 2), ("8b", 4), ("8b", 8), ("32b", 8))
        ]
        assert [panel.peers for panel in drawn] == [[one], [two], [], [], []]


@pytest.mark.parametrize(
    ("folder", "size", "same"),
    [("qwen3-8b", "8B", True), ("8B", "8b", True), ("qwen3-30b-a3b", "8B", False), ("qwen3-18b", "8B", False)],
)
def test_a_folder_s_name_says_its_size(folder: str, size: str, same: bool) -> None:
    assert is_model(folder, size) is same


def test_all_at_once_stands_with_the_same_requests() -> None:
    (big,) = at_once(measured(), MIXED)
    assert (big.model, big.ranks) == ("qwen3-8b", 1)
    assert big.tok_s == {"Lockstride": 11_500.0, "vllm 0.25.1": 9838, "sglang 0.5.17": 8822}, "the last of ours"
    key = "all_at_once_1024_seed5"
    (sparse,) = at_once(measured(), {key: [{**MIXED[key][2], "not_the_same_work": False}]})
    assert (sparse.model, sparse.ranks, sparse.tok_s["vllm 0.25.1"]) == ("qwen3-30b-a3b", 2, 7830)
    changes: list[dict[str, Any]] = [
        {"seed": 6},
        {"num_prompts": 1000},
        {"dataset": "random"},
        {"tp": 2},
        {"rate": 8.0},
    ]
    assert at_once(loads(*(serve_point(None, 1.0, **change) for change in changes)), MIXED) == []


def test_peers_that_did_other_work_are_not_drawn() -> None:
    """Sparse models with each engine's own dummy weights."""
    peers = [*PEERS["results"], *MIXED["all_at_once_1024_seed5"]]
    assert {peer["model"] for peer in peers if peer.get("not_the_same_work")} == {"30B-A3B"}
    rows = [latency(32, 8.4, model="qwen3-30b-a3b", tp=2), latency(32, 5.0)]
    assert [bool(panel.peers) for panel in panels(rows, PEERS["results"])] == [True, False]


def test_a_closed_loop_stands_with_every_concurrency_of_a_peer() -> None:
    (loop,) = closed_loops(measured(), MIXED)
    assert (loop.model, loop.ranks) == ("qwen3-8b", 1)
    assert list(loop.engines) == ["Lockstride", "vllm 0.25.1"]
    ours, theirs = loop.engines["Lockstride"], loop.engines["vllm 0.25.1"]
    assert list(ours) == list(theirs) == [16, 64, 256]
    assert ours[64]["out_tok_s"] == 6900.0
    assert ours[64]["itl_p99_ms"] == pytest.approx(34.5)
    assert (theirs[64]["out_tok_s"], theirs[64]["itl_p99_ms"]) == (5875, 26.4)


def test_the_tokens_per_second_of_mixed_load_are_those_of_today_s_page() -> None:
    """docs/results/mixed-load.figures.jsonl is written by hand."""
    rows, page = read_rows([DOCS / "results" / "mixed-load.figures.jsonl"]), (DOCS / "measurements.md").read_text()
    bars, (loop,) = at_once(rows, MIXED), closed_loops(rows, MIXED)
    rates = [bar.tok_s["Lockstride"] for bar in bars]
    rates += [row["out_tok_s"] for row in loop.engines["Lockstride"].values()]
    assert len(rates) > len(loop.engines["Lockstride"])
    assert [rate for rate in rates if f"{rate:,.0f}" not in page] == []


@pytest.mark.slow
def test_both_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures of today's figures; their words are read from SVG."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("sys.argv", ["plots", "--out", str(tmp_path / "pictures")])
    plots.main()
    for name in ("tpot", "mixed-load"):
        assert (tmp_path / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    plots.tpot_picture(panels([latency(1, 5.0, model="a$x_{b$"), latency(8, 6.0)], PEERS["results"])).savefig(
        svg := tmp_path / "tpot.svg"
    )
    for words in ("Lockstride", "vllm 0.25.1", "roofline floor", "qwen3-8b, 1 x H", "a$x_{b$, 1 x H"):
        assert f"<!-- {words} -->" in svg.read_text()
    plots.mixed_picture(at_once(measured(), MIXED), closed_loops(measured(), MIXED)).savefig(svg)
    for words in ("mixed load, all at once", "sglang 0.5.17", "11,500", "Lockstride p99", "closed loop: time to first"):
        assert words in svg.read_text()
