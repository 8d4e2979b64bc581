"""The command line of `daemon`: its own options, beside the engine's.

Knows: flags, defaults and units. Does not know: what is done with them (daemon/command.py), the engine's options.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.engine_options import WARMED, add_engine_options
from launch.values import at_least_one, whole_number
from runtime.config import EngineConfig

MAX_SESSIONS = 64  # where --max-sessions is not given


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """What `daemon` needs beside the engine's own options."""

    socket: Path | None
    stdio: bool
    stream_fd: int
    stream_tagged: bool
    unread_bytes: int
    generation_config: Literal["auto", "none"]


@dataclass(frozen=True, slots=True)
class DaemonCommand:
    """A parsed command line. ``engine`` holds the EngineConfig fields that were given, and only those."""

    name: str
    engine: Mapping[str, Any]
    daemon: DaemonOptions

    def engine_config(self, tensor_parallel: int) -> EngineConfig:
        """``tensor_parallel``: as check_degrees found it. Raises ConfigError."""
        return EngineConfig(**{"max_sessions": MAX_SESSIONS, **self.engine, "tensor_parallel": tensor_parallel})


def daemon_command(given: dict[str, Any], engine: Mapping[str, Any]) -> DaemonCommand:
    """From what argparse found, the engine's options taken out."""
    return DaemonCommand("daemon", engine, DaemonOptions(**given))


def add_daemon_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    daemon = commands.add_parser(
        "daemon",
        help="sessions of local clients: token quotas and streams",
        description="Keep sessions for clients on this machine: they start, continue and extend them by lines of text, "
        "and read tokens as they come (docs/daemon.md). Exit code: 143 or 130 after SIGTERM or SIGINT, 2 the command "
        "line is wrong, 70 the engine failed.",
        allow_abbrev=False,
    )
    daemon.add_argument(
        "--socket",
        type=Path,
        default=None,
        metavar="FILE",
        help="Unix socket to listen on, for this user alone (default: lockstride.sock) [file]",
    )
    daemon.add_argument(
        "--stdio",
        action="store_true",
        help="one client, on stdin and --stream-fd, instead of a socket; ends with its input (default: off) [switch]",
    )
    daemon.add_argument(
        "--stream-fd",
        type=whole_number,
        default=1,
        metavar="NUMBER",
        help="with --stdio: descriptor for the stream of tokens or frames (default: 1) [number]",
    )
    daemon.add_argument(
        "--stream-tagged",
        action="store_true",
        help="with --stdio: tagged frames from the first one on, without a line TAGGED (default: off) [switch]",
    )
    daemon.add_argument(
        "--unread-bytes",
        type=at_least_one,
        default=1 << 23,
        metavar="BYTES",
        help="a client that leaves more unread loses its connection and its sessions (default: 8388608) [bytes]",
    )
    daemon.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling parameters that START does not give; auto takes them from the model's generation_config.json, "
        "none the API's defaults (default: auto) [word]",
    )
    add_engine_options(daemon.add_argument_group("engine"), shown={**WARMED, "max_sessions": str(MAX_SESSIONS)})
