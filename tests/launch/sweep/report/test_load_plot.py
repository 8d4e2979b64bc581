"""Pictures of `bench serve`: a run over time, and the curve of latency against throughput."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.lines import Line2D

from launch.sweep.report.load_plot import LoadPictures, curve_figure, point_name, timeline_figure
from tests.launch.sweep.report.serve_points import serve_point


def xs(line: Line2D) -> list[float]:
    return [float(value) for value in np.asarray(line.get_xdata())]


def ys(line: Line2D) -> list[float]:
    return [float(value) for value in np.asarray(line.get_ydata())]


def over_time(count: int, **more: int) -> list[dict[str, Any]]:
    return [
        {"t_s": number / 10, "output_throughput": 10.0 * number, "running": number, "waiting": 0, **more}
        for number in range(count)
    ]


def test_a_timeline_shows_tokens_requests_and_steps_where_they_are_known() -> None:
    figure = timeline_figure(over_time(30, prefill_steps=1, decode_steps=4, mixed_steps=0), "title", (0.5, 2.5))
    tokens, requests, steps = figure.axes
    assert tokens.get_ylabel() == "output tokens/s"
    assert ys(tokens.lines[0]) == [10.0 * number for number in range(30)]
    assert ys(tokens.lines[1])[15] == pytest.approx(150.0), "the mean of a second around it"
    assert [line.get_label() for line in requests.lines] == ["running", "waiting"]
    legend = steps.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["prefill steps", "decode steps"]
    assert all(axes.patches for axes in figure.axes), "the steady window is shaded"
    assert len(timeline_figure(over_time(30), "of a server").axes) == 2


def test_a_long_timeline_is_drawn_in_fewer_points_and_loses_no_tokens() -> None:
    rows = over_time(4000)
    tokens, _ = timeline_figure(rows, "title").axes
    drawn = ys(tokens.lines[0])
    assert len(drawn) == 400
    assert sum(drawn) * 10 == pytest.approx(sum(row["output_throughput"] for row in rows))


def test_a_curve_has_a_point_for_each_concurrency_by_throughput() -> None:
    points = [serve_point(most, rate) for most, rate in ((64, 6000.0), (1, 240.0), (256, 9000.0))]
    points.append(serve_point(8, 900.0, p99_itl_ms=None))
    figure = curve_figure({"": points}, "title")
    ttft, itl, e2el = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["TTFT [ms]", "ITL [ms]", "E2EL [ms]"]
    low, high = ttft.lines
    assert xs(low) == [240.0, 900.0, 6000.0, 9000.0]
    assert ys(high) == pytest.approx([rate / 10 for rate in xs(low)])
    assert [text.get_text() for text in e2el.texts] == ["1", "8", "64", "256"]
    assert xs(itl.lines[1]) == [240.0, 6000.0, 9000.0], "what has no time is not drawn"


def test_points_are_named_by_what_was_set() -> None:
    named = [serve_point(64, 1.0), serve_point(None, 1.0, 2.5), serve_point(8, 1.0, 4.0), serve_point(None, 1.0)]
    assert [point_name(point) for point in named] == ["64", "2.5/s", "8 at 4/s", "all"]


def test_files_are_written(tmp_path: Path) -> None:
    pictures = LoadPictures()
    pictures.timeline(over_time(3), "title", None, tmp_path / "t.png")
    pictures.curve([serve_point(1, 240.0), serve_point(8, 900.0)], "title", tmp_path / "c.svg")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "c.svg").read_bytes().startswith(b"<?xml")


def test_a_model_s_name_is_no_formula(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    LoadPictures().timeline(over_time(3), "a$x_{b$c", None, tmp_path / "t.svg")
    assert "<!-- a$x_{b$c -->" in (tmp_path / "t.svg").read_text()
    assert caplog.records == []


def test_a_machine_without_matplotlib_measures_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    pictures = LoadPictures()
    with caplog.at_level(logging.WARNING, "lockstride"):
        pictures.timeline(over_time(3), "title", None, tmp_path / "t.png")
        pictures.curve([serve_point(1, 240.0)], "title", tmp_path / "c.png")
    assert list(tmp_path.iterdir()) == []
    assert [record.getMessage()[:23] for record in caplog.records] == ["pictures are not drawn:"]
