"""Reports: rows, series, pictures, comparisons, and the page as a browser shows it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

from launch.sweep.command import run as run_sweep
from launch.sweep.grid import Grid, grid_of
from launch.sweep.ledger import Ledger
from launch.sweep.options import SweepCommand
from launch.sweep.point import SweepError
from launch.sweep.report import plots
from launch.sweep.report.command import write_report
from launch.sweep.report.html import html
from launch.sweep.report.plots import (
    Missing,
    Picture,
    chain,
    draw_all,
    efficiency,
    frontier,
    load,
    pareto,
    scaling,
    scaling_lines,
    throughput,
    tpot,
)
from launch.sweep.report.rows import (
    Report,
    Row,
    compare,
    differences_between,
    differences_within,
    panels,
    read_report,
    report_of,
    series,
    varying_names,
)
from tests.launch.api.parsed import parsed
from tests.launch.sweep.measured_sweep import example_grid, tpot_ms, write_ledger
from tests.launch.sweep.report.serve_points import serve_point

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
REQUIRED = os.environ.get("LOCKSTRIDE_BROWSER_TESTS") == "required"  # as in CI: a missing browser fails, not skips


def row(**fields: object) -> Row:
    common: dict[str, object] = {"key": "k", "hw": "cpu", "kind": "latency", "model": "m", "precision": "float32"}
    common |= {"tp": 1, "ep": 1, "batch": 1, "input_len": 8, "output_len": 8, "chain_depth": 2, "runs": 3}
    return msgspec.convert({**common, **fields}, Row)


def small_grid() -> Grid:
    return grid_of(
        {"grid": {"model": ["qwen3-0.6b"], "tp": [1, 2], "batch": [1, 8], "depth": [2]}, "options": {"input-len": 512}},
        "small",
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of every kind of point, with its report."""
    out = tmp_path_factory.mktemp("whole")
    earlier = tmp_path_factory.mktemp("earlier")
    write_ledger(earlier, slower=1.05, commit="0000000")
    write_ledger(out)
    assert write_report(out, against=earlier, say=lambda _: None) == 0
    return out


# ---- rows ----


def test_rows_are_what_the_points_left(whole: Path) -> None:
    report = report_of(Ledger(whole))
    assert len(report.rows) == 46
    assert report.points_asked == 48
    points = {point.key: point for point in example_grid().points}
    for found in report.rows:
        assert found.tpot_ms == pytest.approx(tpot_ms(points[found.key]))
        assert found.tpot_percentiles["99"] == pytest.approx(tpot_ms(points[found.key]) * 1.109)
        assert found.settings == {}
    assert [failure.label for failure in report.failures] == [
        "qwen3-8b tp1 batch128 depth0",
        "qwen3-8b tp1 batch128 depth2",
    ]
    assert report.failures[0].reason.startswith("KvMemoryError")


def test_a_ledger_without_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"neither a ledger nor a report\.json"):
        read_report(tmp_path)
    Ledger(tmp_path).begin_sweep(example_grid(), resume=False)
    with pytest.raises(SweepError, match="has no finished point yet"):
        report_of(Ledger(tmp_path))
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(SweepError, match=r"report.json is no report.json"):
        read_report(tmp_path / "report.json")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("results/latency-x.b8-run7.json", '{"p50_tpot_ms": 1'),
        ("results/a.environment.json", '{"commit": '),
        ("results", '{"kind": "latency"}\n'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str) -> None:
    ledger = write_ledger(tmp_path, grid=small_grid())
    point = next(point for point in small_grid().points if point.settings["batch"] == 8)
    path = ledger.folder(point.key) / file
    (path / "x.points.jsonl" if path.is_dir() else path).write_text(content)
    assert run_sweep(parsed(SweepCommand, ["sweep", "report", str(tmp_path)]), {}) == 2
    assert f"lockstride sweep report: error: {path} " in capsys.readouterr().err


def folders_ledger(out: Path, models: Sequence[str]) -> Ledger:
    """Points of models whose folder is called hf; batches of 8 have failed."""
    grid = grid_of({"options": {"device": "cpu"}, "grid": {"model": list(models), "batch": [1, 8]}}, "folders")
    ledger = Ledger(out)
    ledger.begin_sweep(grid, resume=False)
    for number, point in enumerate(grid.points):
        attempt = ledger.begin(point)
        if point.settings["batch"] == 1:
            measured = row(model="hf", tok_s=1.0, tpot_ms=1.0 + number, refused=None)
            (attempt.folder / "results" / "x.points.jsonl").write_bytes(msgspec.json.encode(measured) + b"\n")
        ledger.file(attempt, "" if point.settings["batch"] == 1 else "it broke", 0)
    return ledger


def test_models_whose_folders_have_one_name_are_told_apart(tmp_path: Path) -> None:
    report = report_of(folders_ledger(tmp_path / "two", ["/ckpt/step-1000/hf", "/ckpt/step-2000/hf"]))
    assert {title: [r.tpot_ms for r in rows] for title, rows in panels(report.rows).items()} == {
        "step-1000/hf": [1.0],
        "step-2000/hf": [3.0],
    }
    assert [change.change for change in compare(report, report).changes] == [0.0, 0.0]
    assert [failure.label for failure in report.failures] == ["step-1000/hf batch8", "step-2000/hf batch8"]
    assert [row.model for row in report_of(folders_ledger(tmp_path / "one", ["/ckpt/hf"])).rows] == ["hf"]


def test_points_of_earlier_grids_are_counted_apart(tmp_path: Path) -> None:
    ledger = write_ledger(tmp_path, grid=small_grid())
    content = {"grid": {"model": ["qwen3-0.6b"], "batch": [1, 64], "depth": [2]}, "options": {"input-len": 512}}
    ledger.begin_sweep(grid_of(content, "smaller"), resume=True)
    report = report_of(ledger)
    assert report.points_done == "1 of 2 points done and 3 of earlier grids"
    assert report.points_done in html(report, [], None)


def test_a_finished_point_without_an_outcome_stands_under_failures(tmp_path: Path) -> None:
    ledger, (first, *_) = write_ledger(tmp_path, grid=small_grid()), small_grid().points
    (ledger.folder(first.key) / "outcome.json").write_text("")
    report = report_of(ledger)
    assert len({row.key for row in report.rows}) == 3
    (failure,) = report.failures
    assert (failure.key, failure.label, failure.folder) == (first.key, "tp1 batch1", str(ledger.folder(first.key)))
    assert failure.reason.endswith("cannot be read: remove the folder to measure the point again")


def test_a_report_is_read_back(whole: Path) -> None:
    as_json = read_report(whole / "report" / "report.json")
    from_ledger = report_of(Ledger(whole))
    assert as_json.rows == from_ledger.rows
    assert as_json.environments == from_ledger.environments


def test_series_are_named_by_what_differs() -> None:
    rows = [row(batch=batch, tp=tp, chain_depth=2) for tp in (1, 2) for batch in (8, 1)]
    assert varying_names(rows) == ["tp"]
    assert {label: [r.batch for r in line] for label, line in series(rows, ["tp"]).items()} == {
        "tp1": [1, 8],
        "tp2": [1, 8],
    }
    others = [
        row(settings={"seed": 1}),
        row(settings={"seed": 2}),
        row(settings={"roofline": True}, precision="bfloat16"),
    ]
    assert varying_names(others) == ["precision", "roofline", "seed"]
    assert list(series(others, varying_names(others))) == ["float32 seed1", "float32 seed2", "bfloat16 roofline"]
    assert list(series([row()], [])) == ["tp1"]


def test_panels_are_models_and_kinds() -> None:
    assert list(panels([row(), row(model="n")])) == ["m", "n"]
    assert list(panels([row(), row(kind="throughput")])) == ["m, latency", "m, throughput"]


def test_the_frontier_is_what_nobody_beats_in_both() -> None:
    speeds = [(10.0, 100.0), (20.0, 90.0), (15.0, 80.0), (30.0, 50.0), (30.0, 40.0), (5.0, 100.0)]
    rows = [row(tok_s_per_user=user, tok_s_per_gpu=gpu) for user, gpu in speeds]
    assert [(r.tok_s_per_user, r.tok_s_per_gpu) for r in frontier(rows)] == [(10.0, 100.0), (20.0, 90.0), (30.0, 50.0)]


def test_scaling_compares_points_that_differ_in_tp_alone() -> None:
    rates = {(1, 1): 10.0, (2, 1): 16.0, (4, 1): 20.0, (1, 8): 80.0, (2, 8): 150.0}
    rows = [row(tp=tp, batch=batch, tok_s=rate) for (tp, batch), rate in rates.items()]
    rows.append(row(tp=8, batch=1, tok_s=99.0, chain_depth=0))
    lines = scaling_lines(rows)
    assert list(lines) == ["batch 1", "batch 8"]
    assert efficiency(lines["batch 1"]) == pytest.approx([1.0, 0.8, 0.5])
    assert efficiency(lines["batch 8"]) == pytest.approx([1.0, 0.9375])
    assert scaling_lines([row(tp=1), row(tp=2, batch=8)]) == {}


# ---- environments ----


def test_points_measured_alike_differ_in_nothing(whole: Path) -> None:
    assert differences_within(report_of(Ledger(whole))) == [], "the launcher follows the number of ranks"


def test_points_measured_otherwise_are_called_out(tmp_path: Path) -> None:
    first, second = example_grid().points[0], example_grid().points[4]
    environments = {"commit": {"1": [first.key], "2": [second.key]}, "$NCCL_ALGO": {"Ring": [first.key]}}
    report = Report(name="r", created=0.0, rows=[row(key=first.key), row(key=second.key)], environments=environments)
    assert differences_within(report) == [
        ("$NCCL_ALGO", ["Ring (1 point)", "unset (1 point)"]),
        ("commit", ["1 (1 point)", "2 (1 point)"]),
    ]
    assert "not all measured alike" in html(report, [], None)
    assert "Ring (1 point); unset (1 point)" in html(report, [], None)


def test_an_earlier_environment_is_compared(tmp_path: Path) -> None:
    now = report_of(write_ledger(tmp_path / "now", grid=small_grid()))
    then = report_of(
        write_ledger(
            tmp_path / "then", grid=small_grid(), commit="0", versions={"torch": "2.10"}, variables={"X_": "1"}
        )
    )
    assert differences_between(now, then) == [
        ("$NCCL_NVLS_ENABLE", "unset", "0"),
        ("$X_", "1", "unset"),
        ("commit", "0", "1111111"),
        ("version of python", "unset", "3.12.3"),
        ("version of torch", "2.10", "2.11.0+cu130"),
    ]
    assert differences_between(now, now) == []


# ---- comparison ----


def test_changes_beyond_the_spread_are_faster_or_slower() -> None:
    def measured(batch: int, middle: float) -> Row:
        return row(batch=batch, tpot_ms=middle, tpot_ms_min=middle - 0.1, tpot_ms_max=middle + 0.1)

    then = [measured(1, 10.0), measured(2, 10.0), measured(4, 10.0), measured(8, 10.0), row(batch=16)]
    now = [measured(1, 9.0), measured(2, 10.15), measured(4, 10.5), row(batch=16), measured(32, 1.0)]
    found = compare(*(Report(name="r", created=0.0, rows=rows) for rows in (now, then)))
    assert [(change.now.batch, change.verdict) for change in found.changes] == [
        *((1, "faster"), (4, "slower"), (2, "same"), (16, "no rate"))
    ]
    assert found.changes[0].change == pytest.approx(-0.1)
    assert [r.batch for r in found.only_now] == [32]
    assert [r.batch for r in found.only_then] == [8]


def test_one_run_is_shown_and_not_judged() -> None:
    def measured(tpot_ms: float, ttft_s: float, runs: int) -> list[Row]:
        serve = serve_point(64, 900.0)
        return [row(kind="serve", batch=64, runs=runs, tpot_ms=tpot_ms, ttft_s=ttft_s, serve=asdict(serve))]

    one, other, more = measured(10.0, 0.5, 1), measured(10.001, 5.0, 1), measured(10.001, 5.0, 3)
    reports = [Report(name="r", created=0.0, rows=rows) for rows in (one, other, more)]
    for now in reports[1:]:
        found = compare(now, reports[0])
        assert [change.verdict for change in found.changes] == ["one run"]
        page = Page(html(now, [], found)).words
        assert "0 within their spread, 1 not judged (one run)" in page
        assert "load 64" in page
        assert "+0.0% one run" in page
        assert "+900.0%" in page, "TTFT may change where TPOT does not"


def test_more_runs_are_the_same_measurement_and_another_option_is_not(tmp_path: Path) -> None:
    grids = [example_grid(exclude=[{"batch": [8, 32, 128]}, {"tp": [2, 4]}, {"depth": 0}])]
    content = {"grid": {"model": ["qwen3-0.6b", "qwen3-8b"], "batch": [1], "depth": [2]}}
    grids.append(grid_of({**content, "options": {"input-len": 512, "num-iters": 9}}, "more runs"))
    grids.append(grid_of({**content, "options": {"input-len": 512, "block-size": 16}}, "other blocks"))
    reports = [report_of(write_ledger(tmp_path / str(n), grid=grid)) for n, grid in enumerate(grids)]
    assert len(compare(reports[1], reports[0]).changes) == 2
    assert len(compare(reports[2], reports[0]).changes) == 0


# ---- the page ----


@pytest.mark.slow
def test_the_command_writes_page_pictures_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ledger(tmp_path / "out", grid=small_grid())
    earlier = write_ledger(tmp_path / "earlier", grid=small_grid(), slower=0.5)
    line = [
        "sweep",
        "report",
        str(tmp_path / "out"),
        "--against",
        str(earlier.out),
        "--html",
        str(tmp_path / "to" / "r.html"),
    ]
    assert run_sweep(parsed(SweepCommand, line), {}) == 0
    names = {path.name for path in (tmp_path / "to").iterdir()}
    assert names == {
        "r.html",
        "report.json",
        *(f"{n}.png" for n in ("throughput", "tpot", "pareto", "scaling", "chain")),
    }
    said = capsys.readouterr().out
    assert "4 of 4 points done\n" in said
    assert "0 faster, 4 slower, 0 within their spread" in said
    assert run_sweep(parsed(SweepCommand, ["sweep", "report", str(tmp_path)]), {}) == 2


@pytest.mark.slow
def test_a_report_against_the_one_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier rows are read before they are overwritten."""
    monkeypatch.setattr("launch.sweep.report.command.draw_all", lambda rows: [])
    write_ledger(tmp_path, grid=small_grid())
    said: list[str] = []
    write_report(tmp_path, say=said.append)
    target = tmp_path / "report" / "report.json"
    rows = [replace(row, tpot_ms=9.0, tpot_ms_min=9.0, tpot_ms_max=9.0) for row in read_report(target).rows]
    target.write_bytes(msgspec.json.encode(msgspec.structs.replace(read_report(target), rows=rows)))
    write_report(tmp_path, against=target, say=said.append)
    assert any("4 faster, 0 slower, 0 within their spread" in line for line in said)


def test_a_report_that_has_no_place_is_refused_by_name(tmp_path: Path) -> None:
    write_ledger(tmp_path, grid=small_grid())
    (tmp_path / "file").write_text("")
    below, folder = tmp_path / "file" / "x.html", tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(SweepError, match=rf"--html {below}: no folder {below.parent} can be made: (Not a|File exists)"):
        write_report(tmp_path, target=below)
    with pytest.raises(SweepError, match=rf"--html {folder} is a folder: name a file, such as {folder}/report.html"):
        write_report(tmp_path, target=folder)
    assert not (tmp_path / "report").exists()


def test_pictures_that_the_rows_do_not_carry_are_named() -> None:
    drawn = draw_all([row(tok_s=1.0, tok_s_per_gpu=1.0, tok_s_per_user=1.0, tpot_ms=1000.0)])
    missing = {picture.title: picture.why for picture in drawn if isinstance(picture, Missing)}
    assert missing == {
        "Scaling over tensor-parallel ranks": "it needs points that differ in tp alone",
        "Device idle, and steps in a chain": "no point has device times",
    }
    assert all(isinstance(picture, Missing) for picture in draw_all([row()])), "a row without a rate"
    page = html(Report(name="r", created=0.0, rows=[row()]), draw_all([row()]), None)
    assert "Not drawn: it needs points that differ in tp alone." in page


def test_a_model_s_name_is_no_formula() -> None:
    drawn = draw_all([row(model="a$x_{b$", tok_s=1.0, tok_s_per_gpu=1.0, tok_s_per_user=1.0, tpot_ms=1000.0)])
    pictures = [picture for picture in drawn if isinstance(picture, Picture)]
    assert len(pictures) == 3
    assert all(b"<!-- a$x_{b$ -->" in picture.svg for picture in pictures)


def test_a_picture_that_fails_does_not_cost_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rows: Sequence[Row]) -> None:
        raise ValueError("no glyph")

    name, title, *rest, _ = plots._PICTURES[0]
    monkeypatch.setattr(plots, "_PICTURES", ((name, title, *rest, broken), *plots._PICTURES[1:2]))
    first, second = draw_all([row(tok_s=1.0, tpot_ms=1000.0)])
    assert first == Missing(title, "ValueError: no glyph")
    assert isinstance(second, Picture)


# ---- points under load ----


def load_ledger(out: Path, slower: float = 1.0) -> Ledger:
    """Two concurrencies of two block sizes, and two rates that one process measured."""
    content = {
        "bench": "serve",
        "options": {"model": "qwen3-8b"},
        "grid": {"concurrency": [16, 64], "block-size": [16, 64]},
    }
    ledger = Ledger(out)
    grids = [
        grid_of(content, "loads"),
        grid_of({"bench": "serve", "options": {"model": "m", "request-rate": "2,4"}}, "r"),
    ]
    points = [point for grid in grids for point in grid.points]
    ledger.begin_sweep(replace(grids[0], points=tuple(points)), resume=True)
    for point in points:
        attempt = ledger.begin(point)
        results = attempt.folder / "results"
        concurrency = point.settings.get("concurrency")
        if concurrency is None:
            rows = [serve_point(None, 520.0 * rate / slower, rate, model="m", runs=2) for rate in (2.0, 4.0)]
        else:
            rate = (100.0 + int(point.settings["block-size"])) * int(concurrency) / slower
            rows = [serve_point(int(concurrency), rate, runs=2)]
        (results / "serve-x.points.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        for row in rows:
            (results / f"serve-x.{row.label}-run0.json").write_text(
                json.dumps({"p99_tpot_ms": 7.0 + (row.request_rate or 0)})
            )
        ledger.file(attempt, "", 0)
    return ledger


def test_points_under_load_differ_by_the_lengths_that_were_asked_for(tmp_path: Path) -> None:
    options = {"model": "m", "dataset-name": "random", "concurrency": 16}
    grid = grid_of({"bench": "serve", "options": options, "grid": {"input-len": [128, 4096]}}, "lengths")
    ledger = Ledger(tmp_path)
    ledger.begin_sweep(grid, resume=False)
    for point, tok_s in zip(grid.points, (900.0, 300.0), strict=True):
        attempt = ledger.begin(point)
        results = attempt.folder / "results"
        (results / "serve-x.points.jsonl").write_text(json.dumps(asdict(serve_point(16, tok_s))) + "\n")
        ledger.file(attempt, "", 0)
    report = report_of(ledger)
    assert {change.change for change in compare(report, report).changes} == {0.0}
    assert len(compare(report, report).changes) == 2, "each with itself"
    figure = load(report.rows)
    assert figure is not None
    assert [line.get_label() for line in figure.axes[0].lines] == [
        f"input-len{n} {p}" for n in (128, 4096) for p in ("p50", "p99")
    ]


def test_points_under_load_have_a_curve_and_a_table_of_their_own(tmp_path: Path) -> None:
    report = report_of(load_ledger(tmp_path))
    assert [row.serve.label for row in report.rows if row.serve is not None][-2:] == ["r2", "r4"]
    assert [row.tpot_percentiles["99"] for row in report.rows][-2:] == [9.0, 11.0], "each from its own runs"
    figure = load(report.rows)
    assert figure is not None
    assert len(figure.axes) == 6, "a line of panels a model"
    curves = [axes for axes in figure.axes if axes.get_title() == "qwen3-8b"]
    assert [line.get_label() for line in curves[0].lines] == [
        f"block-size{n} {p}" for n in (16, 64) for p in ("p50", "p99")
    ]
    drawn = draw_all(report.rows)
    assert [picture.name for picture in drawn if isinstance(picture, Picture)] == ["load"]
    assert not any(isinstance(picture, Missing) for picture in drawn), "nothing was measured in batches"
    text = html(report, drawn, None)
    page = Page(text)
    assert "Points under load" in page.words
    assert 'id="points"' not in text, "there is no table of batches"
    assert "good req/s" in page.words
    again = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert again.rows == report.rows


@pytest.mark.parametrize("kind", ["latency", "serve"])
def test_what_speculation_gained_stands_beside_its_points(kind: str) -> None:
    serve = asdict(serve_point(16, 900.0)) if kind == "serve" else None
    plain = row(kind=kind, serve=serve)
    mtp = row(kind=kind, serve=serve, speculation="mtp (synthetic)", num_speculative_tokens=3, accepted_length=2.5)

    def cells(*rows: Row) -> list[list[str]]:
        text = html(Report(name="r", created=0.0, rows=list(rows)), [], None)
        table = text.partition("points")[2].partition("<table>")[2].partition("</table>")[0]
        return [re.findall(r"<t[hd] [^>]*>([^<]*)<", line)[-2:] for line in table.split("<tr>")[1:]]

    assert cells(plain, mtp) == [["speculation", "tok/round"], ["-", "-"], ["mtp (synthetic), k = 3", "2.50"]]
    assert "tok/round" not in cells(plain)[0]


def test_loads_are_compared_point_by_point(tmp_path: Path) -> None:
    now, then = report_of(load_ledger(tmp_path / "now")), report_of(load_ledger(tmp_path / "then", slower=0.5))
    found = compare(now, then)
    assert len(found.changes) == 6
    assert {change.verdict for change in found.changes} == {"faster"}, "their times follow their rates"
    assert len({change.now.identity for change in found.changes}) == 6


@pytest.mark.parametrize("draw", [throughput, tpot, pareto, scaling, chain])
def test_no_legend_hides_a_line(whole: Path, draw: Callable[[Sequence[Row]], Figure | None]) -> None:
    figure = draw([found for found in report_of(Ledger(whole)).rows if found.tok_s is not None])
    assert figure is not None
    figure.draw_without_rendering()
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    assert legends
    for legend in legends:
        words = legend.get_window_extent()
        assert not any(axes.bbox.overlaps(words) for axes in figure.axes)
        assert words.x1 <= figure.bbox.x1


@pytest.mark.slow
def test_the_same_rows_give_the_same_pictures(tmp_path: Path) -> None:
    rows = report_of(write_ledger(tmp_path, grid=small_grid())).rows
    first, again = ([p.svg for p in draw_all(rows) if isinstance(p, Picture)] for _ in range(2))
    assert first == again


class Page(HTMLParser):
    """Tags, links and text of a page; every tag that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_is_whole_and_needs_nothing_else(whole: Path) -> None:
    text = (whole / "report" / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.tags.count("img") == 5
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert not {"script", "link", "iframe"} & set(page.tags)
    for link in page.links:
        assert base64.b64decode(link.partition(",")[2]).startswith(b"<?xml")
    assert "example <of> a sweep" in page.words, "what looks like a tag is text"
    assert "65 blocks are needed, there are 12 & no more" in page.words
    for title in ("All points", "Failed points", "Measured on", "Words", "Against"):
        assert title in page.words


def test_pictures_are_png_files_too(whole: Path) -> None:
    from matplotlib.image import imread

    for path in (whole / "report").glob("*.png"):
        pixels = imread(path)
        assert pixels.shape[1] > 1000, path
        assert (pixels[..., :3] < 0.9).any(axis=2).mean() > 0.01, f"{path} is blank"


# ---- as a browser shows it ----

PROBE = """<script>
addEventListener("load", () => {
  const shown = [...document.querySelectorAll("h1, h2, p, td, th, figcaption, li")];
  const sizes = shown.map(element => parseFloat(getComputedStyle(element).fontSize));
  const images = [...document.images].map(image => [image.naturalWidth, image.clientWidth, image.clientHeight]);
  document.body.dataset.probe = JSON.stringify({
    images: images,
    smallest: Math.min(...sizes),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    height: document.documentElement.scrollHeight,
    text: document.body.innerText.length,
    wide: [...document.querySelectorAll(".wide")].map(box => box.scrollWidth - box.clientWidth),
  });
});
</script>"""


@pytest.mark.skipif(
    CHROMIUM is None and not REQUIRED, reason="no browser here; Debian: apt-get install chromium-headless-shell"
)
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_browser_shows_it_readably(whole: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    assert CHROMIUM is not None, f"none of {BROWSERS} is here: apt-get install chromium-headless-shell"
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text((whole / "report" / "report.html").read_text().replace("</body>", f"{PROBE}</body>"))
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    browser += ["--hide-scrollbars", "--no-first-run"]
    browser += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,5400", f"--screenshot={picture}"]
    shown = subprocess.run(
        [*browser, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    found = re.search(r'data-probe="([^"]*)"', shown)
    assert found is not None
    probe = json.loads(found[1].replace("&quot;", '"'))
    assert len(probe["images"]) == 5
    for natural, width, height in probe["images"]:
        assert natural > 0, "a picture did not load"
        assert width > 1000
        assert height > 250
    assert probe["smallest"] >= 13, "texts can be read"
    assert probe["overflow"] <= 0, "nothing sticks out of the page"
    assert max(probe["wide"]) <= 0, "no table needs scrolling"
    assert probe["text"] > 2000
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (5400, 1280)
    ink = np.asarray((pixels < 0.75).any(axis=2))
    bands = ink[: min(probe["height"], 5400) // 300 * 300].reshape(-1, 300, 1280)
    assert all(band.mean() > 0.004 for band in bands), "no blank stretch"
    assert ink.mean() < 0.5
    colours = np.unique((pixels[::7, ::7] * 15).astype(int).reshape(-1, 3), axis=0)
    assert len(colours) > 30, "lines have colours"
