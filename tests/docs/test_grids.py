"""The grids that documents show can be planned as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.sweep.grid import read_grid

DOCS = Path(__file__).resolve().parents[2] / "docs"


def grids(page: str) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "points"), [("sweeps.md", 52), ("speculation.md", 2)])
def test_the_grid_of_a_page_can_be_planned(page: str, points: int, tmp_path: Path) -> None:
    (text,) = grids(page)
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    assert len(read_grid(path).points) == points


def test_no_other_page_has_a_grid() -> None:
    assert sorted(path.name for path in DOCS.rglob("*.md") if "```yaml" in path.read_text()) == [
        "speculation.md",
        "sweeps.md",
    ]
