"""The flat row of a point keeps its names: published results and reports of earlier versions stay readable."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from launch.bench.point import Measured, Point, ServePoint
from launch.sweep.report.rows import Row

ADDED = {
    "speculation",
    "num_speculative_tokens",
    "accepted_length",
    "round_ms",
    "round_floor_ms",
}  # None in older rows
PROVENANCE = {"date", "commit", "command", "note"}  # docs/measurements.md: added to a row when it is published
PUBLISHED = sorted((Path(__file__).parents[3] / "docs" / "results").glob("*.points.jsonl"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name.partition(".points")[0])
def test_a_published_row_has_a_point_s_fields_and_no_others(path: Path) -> None:
    for line in path.read_text().splitlines():
        kind = ServePoint if json.loads(line)["kind"] == "serve" else Point
        names = {field.name for field in fields(kind)} | PROVENANCE
        assert names - ADDED - {"date", "note"} <= json.loads(line).keys() <= names
        assert msgspec.json.encode(msgspec.json.decode(line, type=kind))


def test_a_report_s_row_is_what_was_measured_and_whose_point_it_is() -> None:
    assert {field.name for field in fields(Row)} - {field.name for field in fields(Measured)} == {
        *("key", "settings", "tpot_percentiles", "serve"),
    }
    for kind in (Point, ServePoint):
        assert {field.name for field in fields(Measured)} <= {field.name for field in fields(kind)}


def test_there_are_published_rows() -> None:
    assert PUBLISHED
