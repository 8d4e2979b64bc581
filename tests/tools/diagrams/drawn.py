"""The parts of a page that are drawn from code: what stands between ``<!-- drawn: NAME -->`` and ``<!-- end -->``.

Knows: how they are found, replaced and checked. Does not know: what is drawn (scheduling.py and its siblings).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"


def redrawn(text: str, drawings: Mapping[str, Callable[[], str]]) -> str:
    """``text`` with each of ``drawings`` made anew. Raises ValueError where a name has not exactly one place."""
    for name, draw in drawings.items():
        found = list(re.finditer(rf"(<!-- drawn: {name} -->\n).*?(<!-- end -->)", text, re.DOTALL))
        if len(found) != 1:
            raise ValueError(f"the page needs exactly one pair of <!-- drawn: {name} --> and <!-- end -->")
        text = f"{text[: found[0].end(1)]}{draw()}\n{text[found[0].start(2) :]}"
    return text


def keep(page: Path, redraw: Callable[[str], str], description: str | None) -> int:
    """The command of a drawing: writes ``page`` anew; with --check only says, by exit code 1, that it is old."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when the drawing is old")
    options = parser.parse_args()
    text = page.read_text()
    current = redraw(text)
    if options.check:
        return int(current != text)
    page.write_text(current)
    return 0
