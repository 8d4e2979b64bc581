"""An API process: `python -m launch.serve.api_process LINK LISTENER`, started by rank 0 and by nothing else.

Knows: how the application, the server and the connection to rank 0 are put together, and in which order they end.
Does not know: routes (app.py), how it was started (processes.py), torch: it never imports it.

LINK and LISTENER are file descriptors: one end of a socketpair with rank 0, and a listening socket that rank 0 keeps
open, so that connections wait in the kernel while an API process is started again. The settings come over LINK, for a
command line is no place for keys. SIGTERM, SIGINT and SIGHUP are ignored: they are rank 0's business, and a launcher
may send them to every process of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from launch.serve.app import ServeApp
from launch.serve.http_protocol import BoundedHttp, with_tls
from launch.serve.metrics import Metrics
from launch.serve.settings import ServerSettings, decoded
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.remote_engine import RemoteEngine
from runtime.frontend.tokenizer import Tokenizer

_LAST_SECONDS = 5.0  # for answers that are on their way when rank 0 is gone
_BACKLOG = 2048
_CONNECTIONS = 65535
_FEW_CONNECTIONS = 4096

log = logging.getLogger("lockstride.api")


class _Server(uvicorn.Server):
    """Leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 after a goodbye of rank 0, 1 when it is gone without one."""
    link, listener = (socket.socket(fileno=int(number)) for number in arguments)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _end_with(os.getppid())
    files = _allow_connections()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(link, listener, files))
    return int(uvloop.run(_serve(link, listener, files)))


def _allow_connections() -> int:
    """As many open files as this process may have: each connection is one. Returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, _CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < _FEW_CONNECTIONS:
        log.warning(
            "this process may have %d open files, and each connection is one: raise the hard limit (ulimit -Hn, now %d)"
            " to %d or more",
            soft,
            hard,
            _FEW_CONNECTIONS,
        )
    return _CONNECTIONS if soft == resource.RLIM_INFINITY else soft


async def _serve(link: socket.socket, listener: socket.socket, files: int) -> int:
    loop = asyncio.get_running_loop()
    came: asyncio.Future[bytes] = loop.create_future()
    over = asyncio.Event()

    def end(why: str | None) -> None:
        over.set()
        came.cancel()

    engine = RemoteEngine(came.set_result, end)
    link.setblocking(False)
    await loop.create_connection(lambda: engine, sock=link)
    try:
        settings = decoded(await came)
    except asyncio.CancelledError:
        return 1  # rank 0 ended before it said anything
    metrics = Metrics(settings.metrics, settings.index)
    app = ServeApp(settings, engine, metrics, *_texts(settings))
    server = _Server(_config(app, settings, files))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    saving = asyncio.ensure_future(_each_second(metrics, engine))
    ending = asyncio.ensure_future(over.wait())
    await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    _leave_within(_LAST_SECONDS)
    server.should_exit = True
    with contextlib.suppress(Exception):
        await serving
    saving.cancel()
    ending.cancel()
    metrics.save()
    return 1 if engine.failed else 0


def _texts(settings: ServerSettings) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Rank 0 has read them before, so that an error shows on its command line."""
    return Tokenizer.if_any(settings.model), chat_template(settings.model, settings.chat_template)


def chat_template(model: str, file: str | None) -> ChatTemplate | None:
    """``file``, else the model folder's. Raises TokenizerError."""
    if file is None:
        return ChatTemplate.from_folder(model)
    return ChatTemplate.from_file(file, model)


def _config(app: ServeApp, settings: ServerSettings, files: int) -> uvicorn.Config:
    protocol: Any = BoundedHttp.within(settings.header_seconds, settings.body_seconds, files)
    if settings.ssl_certfile is not None:
        protocol = with_tls(protocol, settings.ssl_certfile, settings.ssl_keyfile)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=settings.keep_alive,
        timeout_graceful_shutdown=int(_LAST_SECONDS) - 2,
    )


async def _each_second(metrics: Metrics, engine: RemoteEngine) -> None:
    while True:
        engine.say_alive()
        await asyncio.sleep(1.0)
        metrics.save()


def _leave_within(seconds: float) -> None:
    """Whatever still hangs on a client that does not read."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _end_with(parent: int) -> None:
    """The end of the connection says that rank 0 is gone; this is for a loop that does not get to see it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        time.sleep(_LAST_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
