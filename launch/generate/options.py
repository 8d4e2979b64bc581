"""The command line of `generate`: its own options, besides the engine's.

Knows: flags, defaults and units. Does not know: what is done with them (generate/command.py), the engine's options.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.engine_options import WARMED, EngineCommand, RequestDefaults, add_engine_options
from launch.options import add_command, option, switch
from launch.values import at_least_one, bounded, integer, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(RequestDefaults):
    """What `generate` needs besides the engine's own options."""

    input: Path = option("JSONL file of requests", "file", Path, aliases=("-i",))
    output: Path = option("JSONL file to which answers are appended", "file", Path, aliases=("-o",))
    overwrite: bool = switch("truncate the output instead of resuming after its last line")
    retry_errors: bool = switch("remove error rows from the output and retry their lines")
    summary: Path | None = option("write the summary as JSON", "file", Path, None, "not written")
    show: int = option("print this many answers at the end", "answers", whole_number, 0)
    look_ahead: int = option("requests read ahead of the engine", "requests", at_least_one, 256)
    max_line_bytes: int = option("maximum length of an input line", "bytes", bounded(integer, 1, 1 << 30), 1 << 24)


class Command(EngineCommand[GenerateOptions]):
    """A parsed command line."""

    name = "generate"


def generate_command(given: dict[str, Any], engine: Mapping[str, Any]) -> Command:
    """From what argparse found, the engine's options taken out."""
    return Command(engine, GenerateOptions(**given))


def add_generate_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    generate = add_command(
        commands,
        "generate",
        "complete a JSONL file of prompts",
        "Complete every request of a JSONL file and append one line for each, in the order of completion. "
        "Run the same command again to resume after an interruption. Exit code: 0 all lines have an answer, 1 some "
        "failed (their rows say why), 2 the command line is wrong, 130 or 143 interrupted.",
        GenerateOptions,
    )
    add_engine_options(generate, shown=WARMED)
