"""The command line of `generate`: its own options, beside the engine's.

Knows: flags, defaults and units. Does not know: what is done with them (generate/command.py), the engine's options.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.engine_options import WARMED, add_engine_options
from launch.values import at_least_one, bounded, integer, number, whole_number
from runtime.config import EngineConfig


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What `generate` needs beside the engine's own options."""

    input: Path
    output: Path
    overwrite: bool
    retry_errors: bool
    summary: Path | None
    show: int
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    generation_config: Literal["auto", "none"]
    look_ahead: int
    drain_seconds: float
    max_line_bytes: int


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line. ``engine`` holds the EngineConfig fields that were given, and only those."""

    name: str
    engine: Mapping[str, Any]
    generate: GenerateOptions

    def engine_config(self, tensor_parallel: int) -> EngineConfig:
        """``tensor_parallel``: as check_degrees found it. Raises ConfigError."""
        return EngineConfig(**{**self.engine, "tensor_parallel": tensor_parallel})


def generate_command(given: dict[str, Any], engine: Mapping[str, Any]) -> Command:
    """From what argparse found, the engine's options taken out."""
    return Command("generate", engine, GenerateOptions(**given))


def add_generate_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser(
        "generate",
        help="complete a JSONL file of prompts",
        description="Complete every request of a JSONL file and append one line for each, in the order of completion. "
        "Run the same command again to resume after an interruption. Exit code: 0 all lines have an answer, 1 some "
        "failed (their rows say why), 2 the command line is wrong, 130 or 143 interrupted.",
        allow_abbrev=False,
    )
    _add_options(generate)
    add_engine_options(generate.add_argument_group("engine"), shown=WARMED)


def _add_options(parser: argparse.ArgumentParser) -> None:
    def option(flag: str, help_text: str, unit: str, read: Callable[[str], Any], default: Any, shown: str = "") -> None:
        help_text = f"{help_text} (default: {shown or default}) [{unit}]"
        parser.add_argument(flag, help=help_text, type=read, default=default, metavar=unit.upper())

    for name, text in (("input", "JSONL file of requests"), ("output", "JSONL file to which answers are appended")):
        flags = (f"--{name}", f"-{name[0]}")
        parser.add_argument(*flags, type=Path, required=True, metavar="FILE", help=f"{text} (required) [file]")
    for flag, text in (
        ("--overwrite", "truncate the output instead of resuming after its last line"),
        ("--retry-errors", "remove error rows from the output and retry their lines"),
    ):
        parser.add_argument(flag, action="store_true", help=f"{text} (default: off) [switch]")
    option("--summary", "write the summary as JSON", "file", Path, None, "not written")
    option("--show", "print this many answers at the end", "answers", whole_number, 0)
    silent = "default for lines without one: "
    option(
        "--max-tokens",
        silent + "maximum number of output tokens",
        "tokens",
        at_least_one,
        None,
        "16; chats: what fits",
    )
    option("--temperature", silent + "sampling temperature, 0 is greedy", "number", bounded(number, 0), None, "1.0")
    option(
        "--top-p", silent + "top-p, the probability mass to sample from", "share", bounded(number, 1e-9, 1), None, "1.0"
    )
    option("--top-k", silent + "top-k, 0 is all tokens", "tokens", bounded(integer, 0, 2**31 - 1), None, "0")
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling parameters that neither line nor option gives; auto takes temperature, top_k, top_p, min_p and "
        "repetition_penalty from the model's generation_config.json, none the defaults above (default: auto) [word]",
    )
    option("--look-ahead", "requests read ahead of the engine", "requests", at_least_one, 256)
    option(
        "--drain-seconds",
        "after SIGTERM or SIGINT, time for running requests to finish",
        "seconds",
        bounded(number, 0),
        20.0,
    )
    option("--max-line-bytes", "maximum length of an input line", "bytes", bounded(integer, 1, 1 << 30), 1 << 24)
