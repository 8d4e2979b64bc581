"""docs/control-plane.md shows the tables that the code has."""

from __future__ import annotations

import pytest

from parallel.control.protocol.states import FOLLOWER_TABLE, LEADER_TABLE
from tests.tools.diagrams.control import PAGE, drawings, drawn


def test_the_page_is_current() -> None:
    page = PAGE.read_text()
    assert drawn(page) == page, "stale: run python -m tests.tools.diagrams.control"


def test_the_diagrams_have_every_state_and_input() -> None:
    for name, table in (("leader", LEADER_TABLE), ("follower", FOLLOWER_TABLE)):
        diagram = drawings()[name]
        for state, inputs in table.items():
            assert f"    {state.value} --> " in diagram or not inputs
            for given, after in inputs.items():
                (arrow,) = (
                    line for line in diagram.splitlines() if line.startswith(f"    {state.value} --> {after.value}:")
                )
                assert given.value in arrow.partition(": ")[2].split(", ")


def test_a_page_without_a_place_for_a_drawing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no place <!-- kinds --> ... <!-- end kinds -->"):
        drawn(PAGE.read_text().replace("<!-- end kinds -->", ""))
