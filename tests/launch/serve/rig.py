"""A server without processes and ports of its own: the application, and an engine behind a socketpair, in one process.

Knows: how the parts of launch/serve are put together; ASGI, as far as a client needs it. Does not know: HTTP, no byte
of which is parsed here. tests/launch/serve/test_served.py has the whole thing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from launch.serve.app import ServeApp
from launch.serve.http_protocol import BoundedHttp
from launch.serve.metrics import Metrics
from launch.serve.settings import ServerSettings
from runtime.config import EngineConfig
from runtime.frontend.api_links import ApiLink, Beats
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.engine_protocol import Occupancy
from runtime.frontend.engine_server import EngineServer
from runtime.frontend.remote_engine import RemoteEngine
from runtime.frontend.tokenizer import Tokenizer
from runtime.observe.step_record import AGREEMENT_BOUNDS
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import FinishReason
from tests.launch.generate.fake_engine import FakeEngine
from tests.runtime.frontend import small_tokenizers

PATIENCE = 120.0
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class ServedFake(FakeEngine):
    """Whose steps take ``pause`` seconds; ``ended`` are the reasons of what ended."""

    def __init__(self, *, pause: float = 0.0, rows: int = 4, **options: Any) -> None:
        super().__init__(EngineConfig(model="none", device="cpu", max_num_seqs=rows), **options)
        self.pause = pause
        self.ended: list[FinishReason] = []
        self.hold = threading.Event()  # set: a step does not return
        self.held = threading.Event()  # a step has come upon it
        self.silent: tuple[int, ...] = ()
        self.forgetful = False  # keeps no list of what was asked of it and how it ended: for long runs

    def step(self) -> StepOutput:
        while self.hold.is_set():
            self.held.set()
            time.sleep(0.005)
        time.sleep(self.pause)
        output = super().step()
        self.ended += [finished.reason for finished in output.finished]
        if self.forgetful:
            self.added.clear()
            self.ended.clear()
            self._ids.clear()
        return output

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(len(self._running), len(self._waiting), len(self._running), 100)

    @property
    def agreements(self) -> tuple[tuple[int, ...], float]:
        return (0, 0, 3, *(0,) * (len(AGREEMENT_BOUNDS) - 2)), 5e-5

    def silent_ranks(self, seconds: float) -> tuple[int, ...]:
        return self.silent

    def call_on_verdict(self, callback: Callable[[str], object]) -> None:
        pass


@dataclass
class Reply:
    """What came back. ``events``: (event, data) of a stream, JSON decoded but for [DONE]."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])

    @property
    def events(self) -> list[tuple[str, Any]]:
        found = []
        for block in self.body.decode().split("\n\n")[:-1]:
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            data = lines["data"]
            found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return found


class Client:
    """Requests to an ASGI application, as a server would pass them on."""

    def __init__(self, app: ServeApp, engine: RemoteEngine, fake: ServedFake, server: EngineServer) -> None:
        self.app = app
        self.engine = engine
        self.fake = fake
        self.server = server

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.call("GET", path, b"", headers)

    async def post(self, path: str, body: object, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call("POST", path, data, headers)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        gone: asyncio.Event | None = None,
        on_body: Callable[[bytes], object] = lambda data: None,
    ) -> Reply:
        """``gone``: set when the client closes the connection."""
        reply, sent, gone = Reply(), False, gone or asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                reply.body += message.get("body", b"")
                on_body(message.get("body", b""))

        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": raw, "root_path": "", "scheme": "http", "server": ("test", 80), "client": ("test", 1),
            "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        await asyncio.wait_for(self.app(scope, receive, send), PATIENCE)
        return reply

    async def until(self, condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < ends, "it does not come to pass"
            await asyncio.sleep(0.005)


@asynccontextmanager
async def served(
    fake: ServedFake | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    template: str | None = TEMPLATE,
    max_queued: int = 1000,
    **settings: Any,
) -> AsyncIterator[Client]:
    """A server for the time of a block, drained at its end."""
    fake = fake or ServedFake()
    mine, theirs = socket.socketpair()
    theirs.setblocking(False)
    link, beats = ApiLink(mine), Beats()
    beats.speak_to([link])
    beats.start()
    server = EngineServer(fake, [link], beats, max_queued=max_queued, replace=lambda lost, why: None)
    engine = RemoteEngine(lambda data: None, lambda why: None)
    await asyncio.get_running_loop().create_connection(lambda: engine, sock=theirs)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    made = ServerSettings(model="none", names=("m",), max_queued=max_queued, **settings)
    chat = None if template is None else ChatTemplate(template)
    app = ServeApp(made, engine, Metrics((), 0), tokenizer or small_tokenizers.byte_level(), chat)
    client = Client(app, engine, fake, server)
    await client.until(lambda: engine.ready is not None)
    try:
        yield client
    finally:
        fake.hold.clear()
        server.drain(0.0)
        await asyncio.to_thread(thread.join, PATIENCE)
        beats.stop()
        link.close()
    assert not thread.is_alive()
    if failures:
        raise failures[0]


@asynccontextmanager
async def listening(client: Client, limits: type[BoundedHttp] = BoundedHttp) -> AsyncIterator[int]:
    """The application behind HTTP on a port of this machine, in this event loop."""
    config = uvicorn.Config(client.app, http=limits, ws="none", lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        serving = asyncio.ensure_future(server._serve([listener]))
        await client.until(lambda: server.started)
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            server.force_exit = True
            await serving
