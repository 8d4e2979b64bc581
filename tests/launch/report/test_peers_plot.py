"""`bench plot`: which rows are drawn beside which peers, and pictures that are written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launch.bench.options import BenchOptions
from launch.errors import UsageError
from launch.report.peers_plot import PeerResult, is_model, panels, plot, read_rows

pytest.importorskip("matplotlib")

PEERS = Path(__file__).parents[3] / "docs" / "peers.json"


def row(batch: int, tpot_ms: float | None, **more: Any) -> dict[str, Any]:
    common = {"hw": "H", "kind": "latency", "model": "qwen3-8b", "tp": 1, "roofline_floor_ms": 2.0, "refused": None}
    return {**common, "batch": batch, "tpot_ms": tpot_ms, **more}


def results(folder: Path, time: str, *rows: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"latency-qwen3-8b-tp1-{time}.points.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_the_latest_of_a_point_counts(tmp_path: Path) -> None:
    results(tmp_path / "r", "20260102T000000Z", row(1, 5.0), row(8, None, refused="not full"))
    results(tmp_path / "r", "20260101T000000Z", row(1, 9.0), row(8, 6.0), row(8, 1.0, kind="throughput"))
    (panel,) = panels(read_rows([tmp_path / "r"]), [])
    assert {batch: point.tpot_ms for batch, point in panel.ours.items()} == {1: 5.0, 8: 6.0}
    assert panel.floor_ms == {1: 2.0, 8: 2.0}


def test_points_of_another_setup_have_a_panel_of_their_own(tmp_path: Path) -> None:
    plain = {"precision": "bfloat16", "input_len": 512, "output_len": 257, "speculation": None, "chain_depth": 2}
    others: list[dict[str, Any]] = [{"speculation": "mtp", "num_speculative_tokens": 3}, {"input_len": 8192}]
    others += [{"precision": "float32"}, {"hw": "other"}]
    for number, other in enumerate(others):
        rows = [row(1, 4.0, **plain), row(8, 5.0, **plain | {"chain_depth": 1}), row(1, 2.0, **plain | other)]
        first, second = panels(read_rows([results(tmp_path / str(number), "a", *rows)]), [])
        assert [{batch: point.tpot_ms for batch, point in each.ours.items()} for each in (first, second)] == [
            {1: 4.0, 8: 5.0},
            {1: 2.0},
        ]
        notes = [("no speculation", "mtp, k = 3"), ("512/257 tokens", "8192/257 tokens"), ("bfloat16", "float32")]
        assert (first.note, second.note) == [*notes, ("", "")][number]
    out = tmp_path / "p.svg"
    plot(BenchOptions(results=(tmp_path / "0",), out=out))
    assert "<!-- mtp, k = 3 -->" in out.read_text()


def test_peers_stand_beside_the_same_model_and_ranks(tmp_path: Path) -> None:
    one = PeerResult("a", "8B", 1, {1: 6.0}, {1: 3.0, 4: 3.5})
    two = PeerResult("a", "8B", 2, {1: 4.0})
    small = PeerResult("a", "0.6B", 1, {1: 1.0})
    rows = read_rows([results(tmp_path, "a", row(1, 5.0), row(1, 3.0, tp=2), row(1, 1.0, model="other"))])
    first, second, third = panels(rows, [one, two, small])
    assert (first.peers, second.peers, third.peers) == ([one], [two], [])
    assert first.floor_ms == {1: 2.0, 4: 3.5}, "ours where we have it"


def test_panels_stand_by_peers_ranks_and_floor_whatever_the_order_of_files(tmp_path: Path) -> None:
    peers = [PeerResult("a", "8B", tp, {1: 6.0}) for tp in (1, 2)]
    given = [("8b", 2, 2.0), ("32b", 8, 3.0), ("8b", 8, 1.0), ("8b", 4, 1.0), ("8b", 1, 4.0)]
    rows = [row(1, 5.0, model=model, tp=tp, roofline_floor_ms=floor) for model, tp, floor in given]
    for files in (rows, rows[::-1]):
        drawn = panels(read_rows([results(tmp_path, "a", *files)]), peers)
        shown = [(panel.model, panel.tp) for panel in drawn]
        assert shown == [("8b", 1), ("8b", 2), ("8b", 4), ("8b", 8), ("32b", 8)]


@pytest.mark.parametrize(
    ("folder", "size", "same"),
    [
        ("qwen3-8b", "8B", True),
        ("8B", "8b", True),
        ("qwen3-0.6b", "0.6B", True),
        ("qwen3-30b-a3b", "30B-A3B", True),
        ("qwen3-30b-a3b", "8B", False),
        ("qwen3-18b", "8B", False),
    ],
)
def test_a_folder_s_name_tells_its_size(folder: str, size: str, same: bool) -> None:
    assert is_model(folder, size) is same


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_written(tmp_path: Path, ending: str, begins: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    spread = {"tpot_ms_min": 4.0, "tpot_ms_max": 5.5}
    path = results(tmp_path, "a", row(1, 5.0, **spread), row(32, 6.0), row(1, 1.0, model="qwen3-0.6b"))
    out = tmp_path / "pictures" / f"tpot.{ending}"
    assert plot(BenchOptions(results=(path,), peers=PEERS, out=out)) == 0
    assert out.read_bytes().startswith(begins)
    assert capsys.readouterr().out == f"{out}\n"
    if ending == "svg":
        drawn = out.read_text()
        for words in ("Lockstride", "vllm 0.25.1", "roofline floor", "qwen3-0.6b, 1 x H"):
            assert f"<!-- {words} -->" in drawn


def test_a_model_s_name_is_no_formula(tmp_path: Path) -> None:
    out = tmp_path / "tpot.svg"
    plot(BenchOptions(results=(results(tmp_path, "a", row(1, 5.0, model="a$x_{b$")),), out=out))
    assert "<!-- a$x_{b$, 1 x H -->" in out.read_text()


def test_a_fourth_panel_begins_another_line(tmp_path: Path) -> None:
    def size(models: int) -> tuple[float, float, int]:
        rows = [row(1, 5.0, model=f"model-{number}") for number in range(models)]
        out = tmp_path / f"{models}.svg"
        plot(BenchOptions(results=(results(tmp_path, str(models), *rows),), out=out))
        drawn = out.read_text()
        width, height = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', drawn).groups()  # type: ignore[union-attr]
        return float(width), float(height), len(re.findall(r"<!-- model-\d, 1 x", drawn))

    three, four = size(3), size(4)
    assert (three[2], four[2]) == (3, 4)
    assert (four[0], four[1]) == (three[0], 2 * three[1])


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    good = results(tmp_path, "a", row(1, 5.0))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"hw": 1}\n')
    empty = results(tmp_path, "b", row(1, None))
    for options, words in (
        (BenchOptions(results=(tmp_path / "none",)), "none: there is no such result file or folder"),
        (BenchOptions(results=(bad,)), "bad.jsonl, line 1 is no flat row of bench"),
        (BenchOptions(results=(empty,)), "no latency point with a rate"),
        (BenchOptions(results=(good,), peers=bad), "bad.jsonl cannot be read"),
        (BenchOptions(results=(good,), out=tmp_path / "x.doc"), "pictures end in .png"),
    ):
        with pytest.raises(UsageError) as refused:
            plot(options)
        assert words in str(refused.value)
