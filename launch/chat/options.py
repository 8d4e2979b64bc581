"""The command line of `chat`.

Knows: flags, defaults and units. Does not know: what is done with them (chat/command.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from launch.options import add_command, option, switch
from launch.values import at_least_one, bounded, number, whole_number


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A parsed command line."""

    connect: Path = option("socket of the daemon", "file", Path, Path("lockstride.sock"), metavar="SOCKET")
    max_tokens: int = option("longest answer", "tokens", at_least_one, 256)
    quantum: int = option("tokens between two pauses", "tokens", at_least_one, 32)
    temperature: float | None = option(
        "sampling temperature, 0 is greedy", "number", bounded(number, 0), None, "the model's"
    )
    seed: int | None = option("seed", "number", whole_number, None, "the daemon's")
    plain: bool = switch("say what is typed as it is, without the model's chat template")
    stop: tuple[str, ...] = option("stop string, not shown; may be repeated", "text", str, (), "none", action="append")
    name: str = "chat"


def add_chat_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_command(
        commands,
        "chat",
        "talk to a daemon",
        "One session with a daemon: what you type is said to it, and its answer is shown as it comes. "
        "/stats shows counters, /new begins again, /quit ends.",
        ChatCommand,
    )
