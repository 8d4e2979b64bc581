"""The HTTP backend against a small server of the standard library: streaming, kept connections, errors."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from launch.bench.load import openai_backend
from launch.bench.load.client_process import ClientProcesses, ServerAddress
from launch.bench.load.datasets import random_requests
from launch.bench.load.generator import generate_load
from launch.bench.load.journal import Journal
from launch.bench.load.openai_backend import Answer, OpenAIBackend, OpenAIServer
from launch.errors import BenchError, UsageError


class Handler(BaseHTTPRequestHandler):
    """Streams ``max_tokens`` events, in chunks that are no events' ends. Prompts that begin in ``refused`` are."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[dict[str, Any]]] = []
    connections: ClassVar[set[int]] = set()
    drop_first: ClassVar[set[int]] = set()
    refused: ClassVar[range] = range(0)
    held: ClassVar[threading.Event | None] = None  # answers wait for it
    key: ClassVar[str] = ""  # that is asked for
    loading: ClassVar[list[int]] = []  # statuses of the first answers to GET

    def do_GET(self) -> None:
        if not self._admitted():
            return
        if self.loading:
            self._whole(self.loading.pop(0), {"error": {"message": "the model is loading"}})
            return
        self._whole(200 if self.path == "/v1/models" else 404, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._admitted():
            return
        self.asked.append({"path": self.path, **body})
        self.connections.add(id(self.connection))
        if self.held is not None:
            self.held.wait(300)
        if body["prompt"][0] in self.refused:
            self._whole(400, {"error": {"message": "not this one"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = body["max_tokens"]
        for number in range(count):
            choice = {"text": f"t{number}", "finish_reason": "length" if number == count - 1 else None}
            self._chunk(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self._chunk(f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': count}})}\n\n".encode())
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        if body["prompt"][0] in self.drop_first:
            self.close_connection = True

    def _admitted(self) -> bool:
        admitted = not self.key or self.headers["Authorization"] == f"Bearer {self.key}"
        if not admitted:
            self._whole(401, {"error": {"message": "no key"}})
        return admitted

    def _chunk(self, data: bytes) -> None:
        for part in (data[:7], data[7:]):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.flush()

    def _whole(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(port: int = 0) -> Iterator[str]:
    Handler.asked, Handler.connections, Handler.drop_first, Handler.refused = [], set(), set(), range(0)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_request_that_waits_survives_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio's transports refer weakly to a stream's reader, so nobody but us holds a task that waits for bytes."""
    held, done, answer = threading.Event(), threading.Event(), Answer()
    with serving() as url, closing(OpenAIServer(url, "/v1/completions")) as server:
        monkeypatch.setattr(Handler, "held", held)
        body = json.dumps({"prompt": [1], "max_tokens": 2, "stream": True}).encode()
        server.submit(body, answer, done.set)
        while not Handler.asked:
            time.sleep(0.001)
        time.sleep(0.02)  # until the client's thread waits for the head
        gc.collect()
        held.set()
        assert done.wait(300), "the task was collected"
    assert (answer.error, answer.tokens, answer.reason) == ("", 2, "length")


def run(url: str, ids: range, offsets: list[float], concurrency: int | None = None) -> Journal:
    requests = random_requests(len(offsets), 1, ids, 6, 4, 0.0)
    with closing(OpenAIServer(url, "/v1/completions")) as server:
        return generate_load(OpenAIBackend(server, requests), [6] * len(offsets), offsets, concurrency)


def test_a_server_is_measured_like_an_engine() -> None:
    with serving() as url:
        journal = run(url, range(101, 200), [0.0] * 7, concurrency=2)
    assert [one.tokens for one in journal.requests] == [4] * 7
    for one in journal.requests:
        assert (one.error, one.reason) == ("", "length")
        assert one.sent < one.moments[0] <= one.ended == one.moments[-1]
        assert one.moments == sorted(one.moments)
        assert len(one.moments) == 4
    assert len(Handler.connections) <= 3, "connections are kept"
    sent = Handler.asked[0]
    assert sent | {"path": "/v1/completions", "model": "tiny", "max_tokens": 4, "temperature": 0.0} == sent
    assert sent | {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}} == sent
    assert len(sent["prompt"]) == 6
    assert not journal.samples


def test_processes_that_ask_bring_back_the_same() -> None:
    """Two of them, each with a share of the requests; times are those of this process's clock."""
    requests = random_requests(9, 1, range(101, 200), 6, 4, 0.0)
    with serving() as url:
        Handler.refused = range(requests[4].prompt[0], requests[4].prompt[0] + 1)  # type: ignore[arg-type, operator]
        refused = [one.prompt[0] in Handler.refused for one in requests]
        with closing(ClientProcesses(2, ServerAddress(url, "/v1/completions", "tiny"))) as clients:
            journal = generate_load(OpenAIBackend(clients, requests), [6] * 9, [0.0] * 9, 4)
            processes = [child.process for child in clients._children]
    assert [one.failed for one in journal.requests] == refused
    for one in journal.requests:
        if not one.failed:
            assert one.sent < one.moments[0] <= one.ended == one.moments[-1] <= journal.ended
            assert (one.reason, one.tokens, len(one.moments)) == ("length", 4, 4)
        else:
            assert "not this one" in one.error
    assert [process.returncode for process in processes] == [0, 0]


def test_what_was_asked_of_a_process_that_ends_has_failed() -> None:
    requests = random_requests(2, 1, range(101, 200), 6, 4, 0.0)
    with closing(ClientProcesses(1, ServerAddress("http://127.0.0.1:9", "/v1/completions", "tiny"))) as clients:
        clients._children[0].process.kill()
        clients._children[0].process.wait()
        journal = generate_load(OpenAIBackend(clients, requests), [6] * 2, [0.0] * 2)
    assert ["client process has ended" in one.error for one in journal.requests] == [True, True]


def test_a_client_that_is_closed_leaves_what_it_asked_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As after Ctrl-C: answers have not ended, one of this process, one of another."""
    body = json.dumps({"prompt": [1], "max_tokens": 2, "stream": True}).encode()
    held, done = threading.Event(), threading.Event()
    monkeypatch.setattr(ThreadingHTTPServer, "handle_error", lambda *_: None)  # nobody reads the answers
    with serving() as url:
        monkeypatch.setattr(Handler, "held", held)
        with (
            closing(OpenAIServer(url, "/v1/completions")) as server,
            closing(ClientProcesses(1, ServerAddress(url, "/v1/completions", "tiny"))) as clients,
        ):
            server.submit(body, Answer(), done.set)
            clients.submit(body, Answer(), lambda: None)
            while len(Handler.asked) < 2:
                time.sleep(0.001)
            process = clients._children[0].process
            assert os.getpgid(process.pid) != os.getpgid(0), "a terminal's Ctrl-C would end it with a traceback"
        gc.collect()
        held.set()
    assert done.is_set()
    assert process.returncode == 0
    assert (capfd.readouterr().err, caplog.text) == ("", "")


def test_an_open_loop_waits_for_arrivals_beside_answers() -> None:
    with serving() as url:
        journal = run(url, range(101, 200), [0.0, 0.2, 0.4])
    assert all(one.sent >= one.due for one in journal.requests)
    assert journal.requests[2].due - journal.started == pytest.approx(0.4)


def test_a_connection_that_the_server_closed_is_opened_again() -> None:
    with serving() as url:
        Handler.drop_first = set(range(101, 200))
        journal = run(url, range(101, 200), [0.0, 0.3, 0.6], concurrency=1)
    assert [one.error for one in journal.requests] == [""] * 3


def test_what_the_server_refuses_has_failed_with_its_words() -> None:
    with serving() as url:
        Handler.refused = range(100, 101)
        journal = run(url, range(100, 101), [0.0, 0.0])
    for one in journal.requests:
        assert one.failed
        assert one.error.startswith("HTTP 400: ")
        assert "not this one" in one.error


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "LOCKSTRIDE_API_KEY"])
def test_a_server_that_wants_a_key_gets_the_environments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "key", "sk-1")
    for each in ("OPENAI_API_KEY", "LOCKSTRIDE_API_KEY"):
        monkeypatch.delenv(each, raising=False)
    with serving() as url:
        with pytest.raises(BenchError, match=r"HTTP 401 to GET /v1/models: set OPENAI_API_KEY"):
            OpenAIServer(url, "/v1/completions")
        monkeypatch.setenv(name, "sk-1")
        journal = run(url, range(100, 102), [0.0, 0.0])
    assert [one.error for one in journal.requests] == ["", ""]
    monkeypatch.setenv(name, "sk-1\r\nX: y")
    with pytest.raises(UsageError, match="characters that no HTTP header can have"):
        OpenAIServer("localhost:1", "/v1/completions")


@pytest.mark.parametrize("name", [None, "named"])
def test_a_server_that_loads_is_waited_for(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before it listens; not beyond the time that it has."""
    monkeypatch.setattr(openai_backend, "_ASK_AGAIN", 0.01)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    later = threading.Thread(target=lambda: started.wait() and up.enter_context(serving(port)))
    started, refused = threading.Event(), asyncio.open_connection
    with ExitStack() as up:

        async def connected(*given: Any, **options: Any) -> Any:
            started.set()
            return await refused(*given, **options)

        monkeypatch.setattr(asyncio, "open_connection", connected)
        later.start()
        monkeypatch.setattr(Handler, "loading", [503, 503, 502])
        with closing(OpenAIServer(f"127.0.0.1:{port}", "/v1/completions", name, patience=60.0)) as server:
            assert (server.model, Handler.loading) == (name or "tiny", [])
        later.join()
        monkeypatch.setattr(Handler, "loading", [503] * 1000)
        with pytest.raises(BenchError, match=r"HTTP 503\): is the server running"):
            OpenAIServer(f"127.0.0.1:{port}", "/v1/completions", patience=0.05)
        monkeypatch.setattr(Handler, "loading", [404])
        with pytest.raises(BenchError, match="HTTP 404"):
            OpenAIServer(f"127.0.0.1:{port}", "/v1/completions", patience=60.0)
        assert Handler.loading == [], "asked once: it is ready, and lists no models"


def test_no_server_is_said_at_once() -> None:
    with serving() as url:
        pass
    with pytest.raises(BenchError, match="is the server running"):
        OpenAIServer(url, "/v1/completions")
    with closing(OpenAIServer(url, "/v1/completions", "named")) as server:
        requests = random_requests(1, 1, range(101, 200), 6, 4, 0.0)
        journal = generate_load(OpenAIBackend(server, requests), [6], [0.0])
    assert "Connect" in journal.requests[0].error
    for address in ("ftp://x", "http://localhost:port", "http://localhost:99999", "http://[::1"):
        with pytest.raises(UsageError, match="is no address such as"):
            OpenAIServer(address, "/v1/completions")
    assert all(thread.name != "openai" for thread in threading.enumerate()), "every loop has ended"
