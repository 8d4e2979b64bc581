"""How options are added to a parser of `bench`: each shows its default and its unit, as the engine's do.

Knows: the form of a help text. Does not know: which options there are (options.py, serve_options.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any


class OptionAdder:
    """Adds options to ``parser``; their defaults are those of the dataclass ``owner``, by field name."""

    def __init__(self, parser: argparse.ArgumentParser, owner: type[Any]) -> None:
        self.parser = parser
        self._defaults = {field.name: field.default for field in fields(owner)}

    def value(
        self, flag: str, text: str, unit: str, read: Callable[[str], Any], shown: str = "", *aliases: str, **more: Any
    ) -> None:
        """An option with a value that ``read`` makes of its text. ``shown``: the default, where it is not the field's.

        ``more`` goes to argparse.
        """
        dest = flag[2:].replace("-", "_")
        shown = shown or str(self._defaults[dest])
        metavar = None if "choices" in more else unit.upper()
        text = f"{text} (default: {shown}) [{unit}]"
        self.parser.add_argument(flag, *aliases, dest=dest, help=text, type=read, metavar=metavar, **more)

    def switch(self, flag: str, text: str) -> None:
        """An option without a value, off by default."""
        self.parser.add_argument(flag, action="store_true", help=f"{text} (default: off) [switch]")
