"""The drawn parts of the documents are what their scripts draw now, and the text around them misses nothing."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import pairwise

import pytest

from runtime.config import EngineConfig
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.states import State
from tests.tools.diagrams import embedding as draw_embedding
from tests.tools.diagrams import recurrent as draw_recurrent
from tests.tools.diagrams import speculation as draw_speculation
from tests.tools.diagrams.drawn import DOCS
from tests.tools.diagrams.scheduling import DOCUMENT, redrawn
from tests.tools.diagrams.timeline import PICTURE, picture, play


def test_the_scheduling_drawings_are_current() -> None:
    text = DOCUMENT.read_text()
    assert redrawn(text) == text, "run: make diagram"


def test_the_drawing_of_a_round_is_current() -> None:
    text = draw_speculation.DOCUMENT.read_text()
    assert draw_speculation.redrawn(text) == text, "run: make diagram"
    assert draw_speculation.redrawn(text.replace("sample --> accept", "sample --> commit")) == text


def test_the_tables_of_recurrent_state_are_current() -> None:
    text = draw_recurrent.PAGE.read_text()
    changed = text.replace("none: state is only read", "each live row's")
    assert draw_recurrent.redrawn(changed) == text, "run: make diagram"


def test_the_fields_of_the_configuration_are_current() -> None:
    text = draw_embedding.PAGE.read_text()
    assert draw_embedding.redrawn(text) == text, "run: make diagram"
    assert draw_embedding.redrawn(text.replace("| `max_prefill_tokens`, ", "| `max_num_batched_tokens`, ")) == text
    table = text.partition("<!-- drawn: fields -->")[2].partition("<!-- end -->")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {field.name for field in fields(EngineConfig)}


def test_a_verify_of_16_tokens_keeps_a_fiftieth_of_their_states_at_most() -> None:
    """Of every shape, all recurrent layers: what waits for the draw, against a state behind each of 16 tokens."""
    shapes = {one.shape: one for one in draw_recurrent.declared()}
    assert {"nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b"} <= shapes.keys()
    for name, one in shapes.items():
        assert one.mixer.replays
        (_, channels), dtype = next(iter(one.kind.tensors.values()))  # inputs of the convolution are kept, too
        assert one.kept_bytes > one.layers * channels * dtype.itemsize
        assert 16 * one.kept_bytes <= 0.02 * 16 * one.slot_bytes, name


def test_a_step_whose_rows_of_state_are_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match="makes no StateRows"):
        draw_recurrent.state_rows_of(draw_recurrent.writes)


def test_an_old_drawing_is_noticed() -> None:
    text = DOCUMENT.read_text()
    old = text.replace("waiting --> prefill : admit", "waiting --> decode : admit")
    assert old != text
    assert redrawn(old) == text


def test_a_document_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly one pair of <!-- drawn: states -->"):
        redrawn("no markers")


def test_every_state_and_counter_is_explained() -> None:
    text = DOCUMENT.read_text()
    for state in State:
        assert f"\n| {state.value} |" in text
    explained = set(re.findall(r"`(\w+)`", (DOCS / "observability.md").read_text()))
    counted = {field.name for field in fields(ScheduleCounters) if field.type == "int"}
    assert counted <= explained


def test_the_picture_of_the_timeline_is_current() -> None:
    assert picture() == PICTURE.read_text(), "run: make diagram"


def test_the_picture_shows_what_its_titles_say() -> None:
    """Serial: a gap before every step. Chained: none, though a request stops and another joins; hence more steps."""
    serial, chained = ([box for box in play(depth) if box.what in ("prefill", "decode")] for depth in (0, 2))
    assert all(after.start > before.end for before, after in pairwise(serial))
    assert all(after.start == before.end for before, after in pairwise(chained))
    assert len(chained) > len(serial)
    assert sum(ghost for box in chained for _, ghost in box.rows) == 2
