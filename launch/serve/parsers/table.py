"""The formats of tool calls, by their names in `--tool-call-parser`, which are vLLM's.

Knows: the formats there are. Does not know: how one is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from launch.serve.parsers.deltas import ToolParser
from launch.serve.parsers.hermes import HermesParser

PARSERS: Final[Mapping[str, type[ToolParser]]] = {"hermes": HermesParser}
