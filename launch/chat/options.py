"""The command line of `chat`.

Knows: flags, defaults and units. Does not know: what is done with them (chat/command.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.values import at_least_one, bounded, number, whole_number


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A parsed command line."""

    name: str
    connect: Path
    max_tokens: int
    quantum: int
    temperature: float | None
    seed: int | None
    plain: bool
    stop: tuple[str, ...] = ()


def chat_command(given: dict[str, Any]) -> ChatCommand:
    """From what argparse found."""
    return ChatCommand("chat", **{**given, "stop": tuple(given["stop"])})


def add_chat_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a daemon",
        description="One session with a daemon: what you type is said to it, and its answer is shown as it comes. "
        "/stats shows counters, /new begins again, /quit ends.",
        allow_abbrev=False,
    )
    chat.add_argument(
        "--connect",
        type=Path,
        default=Path("lockstride.sock"),
        metavar="SOCKET",
        help="socket of the daemon (default: lockstride.sock) [file]",
    )
    chat.add_argument(
        "--max-tokens",
        type=at_least_one,
        default=256,
        metavar="TOKENS",
        help="longest answer (default: 256) [tokens]",
    )
    chat.add_argument(
        "--quantum",
        type=at_least_one,
        default=32,
        metavar="TOKENS",
        help="tokens between two pauses (default: 32) [tokens]",
    )
    chat.add_argument(
        "--temperature",
        type=bounded(number, 0),
        default=None,
        metavar="NUMBER",
        help="sampling temperature, 0 is greedy (default: the model's) [number]",
    )
    chat.add_argument(
        "--seed", type=whole_number, default=None, metavar="NUMBER", help="seed (default: the daemon's) [number]"
    )
    chat.add_argument(
        "--plain",
        action="store_true",
        help="say what is typed as it is, without the model's chat template (default: off) [switch]",
    )
    chat.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop string, not shown; may be repeated (default: none) [text]",
    )
