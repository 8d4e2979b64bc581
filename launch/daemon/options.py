"""The command line of `daemon`: its own options, besides the engine's.

Knows: flags, defaults and units. Does not know: what is done with them (daemon/command.py), the engine's options.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from launch.engine_options import WARMED, EngineCommand, FolderDefaults, add_engine_options
from launch.options import add_command, option, switch
from launch.values import at_least_one, whole_number

MAX_SESSIONS = 64  # where --max-sessions is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions(FolderDefaults):
    """What `daemon` needs besides the engine's own options."""

    socket: Path | None = option("Unix socket to listen on, for this user alone", "file", Path, None, "lockstride.sock")
    stdio: bool = switch("one client, on stdin and --stream-fd, instead of a socket; ends with its input")
    stream_fd: int = option("with --stdio: descriptor for the stream of tokens or frames", "number", whole_number, 1)
    stream_tagged: bool = switch("with --stdio: tagged frames from the first one on, without a line TAGGED")
    unread_bytes: int = option(
        "a client that leaves more unread loses its connection and its sessions", "bytes", at_least_one, 1 << 23
    )


class DaemonCommand(EngineCommand[DaemonOptions]):
    """A parsed command line."""

    name = "daemon"
    defaults: ClassVar = {"max_sessions": MAX_SESSIONS}


def daemon_command(given: dict[str, Any], engine: Mapping[str, Any]) -> DaemonCommand:
    """From what argparse found, the engine's options taken out."""
    return DaemonCommand(engine, DaemonOptions(**given))


def add_daemon_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    daemon = add_command(
        commands,
        "daemon",
        "sessions of local clients: token quotas and streams",
        "Keep sessions for clients on this machine: they start, continue and extend them by lines of text, "
        "and read tokens as they come (docs/daemon.md). Exit code: 143 or 130 after SIGTERM or SIGINT, 2 the command "
        "line is wrong, 70 the engine failed.",
        DaemonOptions,
    )
    add_engine_options(daemon, shown={**WARMED, "max_sessions": str(MAX_SESSIONS)})
