"""`bench plot --kind serve`: which points stand beside which peers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from launch.bench.options import BenchOptions
from launch.bench.point import ServePoint
from launch.errors import UsageError
from launch.report.mixed_plot import LoadRow, at_once, closed_loops, plot_mixed, read_points
from tests.launch.report.serve_points import serve_point

pytest.importorskip("matplotlib")

DOCS = Path(__file__).parents[3] / "docs"
PEERS = DOCS / "peers.json"
MIXED = json.loads(PEERS.read_text())["mixed_load"]


def results(folder: Path, *points: ServePoint) -> Path:
    path = folder / "serve-qwen3-8b-tp1-20261201T000000Z.points.jsonl"
    path.write_text("".join(json.dumps(asdict(point)) + "\n" for point in points))
    return path


def rows(points: list[ServePoint]) -> list[LoadRow]:
    return [msgspec.convert(asdict(point), type=LoadRow) for point in points]


def measured() -> list[ServePoint]:
    points = [serve_point(None, 9000.0), serve_point(None, 11_500.0)]
    points += [serve_point(None, 13_000.0, model="qwen3-30b-a3b", tp=2, ep=2)]
    return points + [serve_point(most, rate) for most, rate in ((16, 3100.0), (64, 6900.0), (256, 9300.0))]


def test_all_at_once_stands_beside_the_same_requests() -> None:
    big, sparse = at_once(rows(measured()), MIXED)
    assert (big.model, big.ranks) == ("qwen3-8b", 1)
    assert big.tok_s == {"Lockstride": 11_500.0, "vllm 0.25.1": 9838, "sglang 0.5.17": 8822}, "the latest of ours"
    assert (sparse.model, sparse.ranks, sparse.tok_s["vllm 0.25.1"]) == ("qwen3-30b-a3b", 2, 7830)
    others = [
        serve_point(None, 1.0, seed=6),
        serve_point(None, 1.0, num_prompts=1000),
        serve_point(None, 1.0, dataset="random"),
        serve_point(None, 1.0, tp=2),
        serve_point(None, 1.0, rate=8.0),
    ]
    assert at_once(rows(others), MIXED) == []


def test_a_closed_loop_stands_beside_every_concurrency_of_a_peer() -> None:
    (loop,) = closed_loops(rows(measured()), MIXED)
    assert (loop.model, loop.ranks, loop.requests) == ("qwen3-8b", 1, 384)
    assert list(loop.engines) == ["Lockstride", "vllm 0.25.1"]
    ours, theirs = loop.engines["Lockstride"], loop.engines["vllm 0.25.1"]
    assert list(ours) == list(theirs) == [16, 64, 256]
    assert ours[64]["out_tok_s"] == 6900.0
    assert ours[64]["itl_p99_ms"] == pytest.approx(34.5)
    assert (theirs[64]["out_tok_s"], theirs[64]["itl_p99_ms"]) == (5875, 26.4)


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = results(tmp_path, *measured()), tmp_path / "pictures" / "mixed.svg"
    assert plot_mixed(BenchOptions(results=(path,), peers=PEERS, out=out, kind="serve")) == 0
    assert capsys.readouterr().out == f"{out}\n"
    drawn = out.read_text()
    for words in ("mixed load, all at once", "sglang 0.5.17", "11,500", "Lockstride p99", "closed loop: time to first"):
        assert words in drawn


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    path = results(tmp_path, serve_point(None, 1.0, num_prompts=3), serve_point(None, 1.0, refused="1 request failed"))
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"kind": "serve"}\n')
    for options, words in (
        (BenchOptions(results=(path,)), "type --peers docs/peers.json"),
        (BenchOptions(results=(path,), peers=PEERS), "type --num-prompts and --seed as its mixed_load has them"),
        (BenchOptions(results=(torn,), peers=PEERS), "torn.jsonl, line 1 is no flat row of bench serve"),
        (BenchOptions(results=(path,), peers=torn), "has the requests"),
        (BenchOptions(results=(path,), peers=path.parent), "cannot be read"),
    ):
        with pytest.raises(UsageError) as refused:
            plot_mixed(options)
        assert words in str(refused.value)
    assert len(read_points([path])) == 1, "a point with a failed request does not count"
