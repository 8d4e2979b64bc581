"""`daemon`: clients' sessions on rank 0, over an engine on all ranks.

Knows: what surrounds the daemon's loop: ranks, descriptors, the socket's file, signals, exit codes.
Does not know: the protocol (runtime/daemon), how an engine works.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from launch.api.sampling_defaults import settled
from launch.daemon.options import DaemonCommand, DaemonOptions
from launch.errors import UsageError
from launch.ranks.process_group import joined
from launch.ranks.rendezvous import Rendezvous
from launch.ranks.signals import Interrupts
from runtime.client_socket import listen
from runtime.config import EngineConfig
from runtime.daemon.server import DaemonEngine, Endpoint, SlotServer
from runtime.daemon.session import Connection
from runtime.frontend.tokenizer import Tokenizer

DEFAULT_SOCKET = Path("lockstride.sock")
_STDIN = 0
_BACKLOG = 64

log = logging.getLogger("lockstride")


class LedEngine(DaemonEngine, Protocol):
    """What the command needs of an engine beyond the daemon's turns."""

    def follow(self) -> None: ...
    def call_on_verdict(self, callback: Callable[[str], object]) -> bool: ...


OpenEngine = Callable[[EngineConfig, Rendezvous], AbstractContextManager[LedEngine]]


def run(command: DaemonCommand, environ: Mapping[str, str], open_engine: OpenEngine) -> int:
    """The whole command on this rank; returns its exit code.

    Raises UsageError, ConfigError, ModelConfigError, RendezvousError or TokenizerError before any work is done when it
    cannot be, and whatever the engine raises.
    """
    (rendezvous, config, defaults), options = settled(command, environ), command.options
    if not config.max_sessions:
        raise UsageError("--max-sessions 0: a daemon without sessions does nothing; type --max-sessions 64")
    if not rendezvous.topology.is_leader:
        with joined(rendezvous, config.device), open_engine(config, rendezvous) as engine, Interrupts() as interrupts:
            engine.follow()
            return interrupts.exit_code
    tokenizer = Tokenizer.if_any(config.model)
    only, listener, path = _ends(options)
    try:
        with joined(rendezvous, config.device), open_engine(config, rendezvous) as engine:
            limits = min(1 << 18, options.unread_bytes), options.unread_bytes
            server = SlotServer(engine, tokenizer, defaults, listener=listener, only=only, unread_bytes=limits)

            def verdict(why: str) -> None:
                server.end(f"the engine failed: {why}")
                if path is not None:
                    path.unlink(missing_ok=True)  # this process is about to leave without more ado

            verdict_follows = engine.call_on_verdict(verdict)
            with Interrupts() as interrupts:

                def tend() -> None:
                    if interrupts.signal is not None:
                        server.stop()

                log.info("%d sessions on %s", config.max_sessions, "stdin" if path is None else path)
                server.run(tend, verdict_follows=verdict_follows)
                return interrupts.exit_code
    finally:
        if listener is not None:
            listener.close()
        if path is not None:
            path.unlink(missing_ok=True)


def _ends(options: DaemonOptions) -> tuple[Endpoint | None, socket.socket | None, Path | None]:
    """The one connection over descriptors, or the socket to listen on and its file. Raises UsageError."""
    if options.stdio:
        if options.socket is not None:
            raise UsageError("--stdio and --socket: one or the other")
        try:
            access = fcntl.fcntl(options.stream_fd, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError as error:
            raise UsageError(f"--stream-fd {options.stream_fd} is not open: {error.strerror}") from error
        if access == os.O_RDONLY:
            raise UsageError(f"--stream-fd {options.stream_fd} cannot be written to")
        hard = options.unread_bytes
        connection = Connection(tagged=options.stream_tagged, soft=min(1 << 18, hard), hard=hard)
        return Endpoint(connection, _STDIN, options.stream_fd), None, None
    for flag, given in (("--stream-tagged", options.stream_tagged), ("--stream-fd", options.stream_fd != 1)):
        if given:
            raise UsageError(f"{flag} is for --stdio; clients of a socket say TAGGED 1")
    path = options.socket or DEFAULT_SOCKET
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise UsageError(f"--socket {path} is a file that is no socket")
    try:
        return None, listen(path, _BACKLOG), path
    except OSError as error:
        raise UsageError(f"--socket {path} cannot be listened on: {error}") from error
