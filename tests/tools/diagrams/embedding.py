"""Draws the fields of EngineConfig into docs/embedding.md: ``python -m tests.tools.diagrams.embedding`` (``--check``
looks).

Knows: fields, flags and what --help says of them, as the code has it. Does not know: the prose around them.
"""

from __future__ import annotations

import argparse
import re
import sys

from launch.engine_options import add_engine_options
from tests.tools.diagrams import drawn
from tests.tools.diagrams.drawn import DOCS

PAGE = DOCS / "embedding.md"
NO_UNITS = ("switch", "word", "json", "kinds", "number", "fraction")
_HELP = re.compile(r"(?P<what>.*) \((?:default: )?(?P<default>.*?)\) \[(?P<unit>.*)\]")


def field_table() -> str:
    """A flag is shown where it is not the field's name with dashes, a unit where it is one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_engine_options(parser)
    rows = ["| field, other flags | what it is | default |", "| --- | --- | --- |"]
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if not flag.startswith("--no-")]
        others = [flag for flag in flags if flag != f"--{action.dest.replace('_', '-')}"]
        read = _HELP.fullmatch(action.help or "")
        if read is None:
            raise ValueError(f"the help of {flags} has another form: {action.help}")
        names = ", ".join(f"`{name}`" for name in (action.dest, *others))
        unit = "" if read["unit"] in NO_UNITS or not re.match(r"\d", read["default"]) else f" ({read['unit']})"
        cells = names, read["what"], read["default"] + unit
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def redrawn(text: str) -> str:
    return drawn.redrawn(text, {"fields": field_table})


if __name__ == "__main__":
    sys.exit(drawn.keep(PAGE, redrawn, __doc__))
