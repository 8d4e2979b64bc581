"""Heads, bodies, trailers and their times, offers of another protocol, and connections that are too many."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from launch.serve import http_protocol
from launch.serve.http_protocol import CROWDED, MAX_HEAD_BYTES, BoundedHttp, Connections, with_tls
from tests.launch.serve.rig import listening, served

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"upgrade-insecure-requests: 1\r\nX-Upgrade: yes\r\nHTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\nContent-Length: 24"
)
BODY = b'{"prompt": "\nupgrade: 1"}\nup'
DEAF = HEAD.replace(b"\r\nUpgrade: h2c", b"\r\nnoffer-: h2c")
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


# For these tests alone: signed by itself, trusted by nothing.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgEPI8Y7bMnZI8Y54M
75Tzqn1skL92X1fyHZUBcnkt2zihRANCAARkBIf8PT9VeiQVJQDJ9zSAx4fYJH9V
Ni4bmGitrlSvMrtTBLAOY3dBcjPHRde4nN9sFJIBGaae2NbqBYz/jKmj
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBfzCCASWgAwIBAgIUG3120wkBWlvNmEaCRPA62r0t0wgwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTExNTgwM1oYDzIxMjYxMTA1
MTE1ODAzWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARkBIf8PT9VeiQVJQDJ9zSAx4fYJH9VNi4bmGitrlSvMrtTBLAOY3dB
cjPHRde4nN9sFJIBGaae2NbqBYz/jKmjo1MwUTAdBgNVHQ4EFgQUChYP2J+pSTzU
Ev33DTa/oT3XViswHwYDVR0jBBgwFoAUChYP2J+pSTzUEv33DTa/oT3XViswDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiAR856iQFz9AhYC3eyXD+tc
x41eBHNGl7Pt6OivdGMw/wIhAKNDMjUcs/7yBGfTA96f97FA+1AjitEDvN0sRLSx
lw+4
-----END CERTIFICATE-----
"""


class Transport:
    """``out``: what was written to the client."""

    def __init__(self) -> None:
        self.out = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.out += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Timers:
    """A loop whose time does not pass. ``set``: seconds and call of each timer that runs."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, call: Any) -> Any:
        timer = (seconds, call)
        self.set.append(timer)
        return SimpleNamespace(cancel=lambda: self.set.remove(timer))

    def create_task(self, task: Any) -> Any:
        task.close()
        return Mock()

    def fire(self) -> float:
        """The one timer that there is."""
        ((seconds, call),) = self.set
        self.set.clear()
        call()
        return seconds


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError


CONFIG = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)


def protocol(seats: Connections | None = None) -> Any:
    """A connection that was just made."""
    kind = type("Kind", (BoundedHttp,), {"seats": seats or Connections(1000)})
    made: Any = kind(CONFIG, ServerState(), {}, Timers())
    made.connection_made(Transport())
    return made


def answer(one: Any) -> None:
    """As the application's end leaves it."""
    one.cycle.response_started = one.cycle.response_complete = True
    one.on_response_complete()


def said(one: Any) -> tuple[int, Any]:
    """Status and error object of what was written."""
    head, _, body = one.transport.out.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]


@pytest.mark.parametrize("seed", range(40))
def test_an_offer_of_another_protocol_is_not_seen_however_it_is_cut(seed: int) -> None:
    """And nothing of the body is changed or held back."""
    rng, one, seen = random.Random(seed), protocol(), b""
    for head in (HEAD, HEAD.lower()):
        data, found = head + b"\r\n\r\n" + BODY, b""
        while data:
            size = rng.randint(1, 1 if seed == 0 else 60)
            piece, data = data[:size], data[size:]
            found += piece if b"\r\n\r\n" in found else one._without_offer(piece)
        one._held = one._tail = b""  # as the end of a head leaves them
        seen += found
    assert seen == b"".join(head + b"\r\n\r\n" + BODY for head in (DEAF, DEAF.lower()))


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [MAX_HEAD_BYTES, MAX_HEAD_BYTES + 1])
def test_a_head_is_measured_without_the_body_that_shares_its_read(
    size: int, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one read, or in two: the second begins with the last bytes of the blank line, or of the body."""
    parsed: list[bytes] = []
    monkeypatch.setattr(HttpToolsProtocol, "data_received", lambda _, data: parsed.append(data))
    head = b"POST / HTTP/1.1\r\nHost: here\r\nA: "
    head += b"a" * (size - len(head) - 4) + b"\r\n\r\n"
    pieces = [head[: len(head) - cut], head[len(head) - cut :] + b"b" * 200_000] if cut else [head + b"b" * 200_000]
    one = protocol()
    for piece in pieces:
        if not one.transport.closed:
            one.data_received(piece)
    if size > MAX_HEAD_BYTES:
        assert said(one)[0] == 431
        assert b"b" not in b"".join(parsed)
    else:
        assert b"".join(parsed) == head + b"b" * 200_000
        assert not one.transport.closed


def test_a_head_that_begins_beside_an_answer_does_not_cut_it_off() -> None:
    one = protocol()
    one.data_received(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    one.data_received(b"\r\n")
    assert one.loop.fire() == one.head_seconds
    assert not one.transport.closed
    answer(one)
    one.loop.set = one.loop.set[:1]  # not the one of a connection that is kept
    assert one.loop.fire() == one.head_seconds
    assert one.transport.closed
    assert said(one)[0] == 408


ENDLESS = {
    "trailers": b"1\r\na\r\n0\r\n" + b"a: b\r\n" * 60_000,
    "one trailer's name": b"1\r\na\r\n0\r\n" + b"a" * 300_000,
    "one trailer's value": b"1\r\na\r\n0\r\na: " + b"a" * 300_000,
    "a chunk's extension": b"1\r\na\r\n1;" + b"a" * 300_000,
}


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("answered", [False, True])
def test_what_a_chunked_body_has_besides_its_bytes_is_bounded(what: str, answered: bool) -> None:
    """Also of a request that was refused before its body was read, for want of a key."""
    one, sent = protocol(), 0
    one.data_received(CHUNKED)
    if answered:
        answer(one)
    while not one.transport.closed:
        one.data_received(ENDLESS[what][sent : sent + 16_000])
        sent += 16_000
    assert sent <= MAX_HEAD_BYTES + 2 * 16_000
    assert one.transport.out == b"" if answered else said(one)[0] == 431
    assert [name for name, _ in one.scope["headers"]] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize("size", [1, 7, 5000, 1 << 18])
def test_a_body_in_many_chunks_is_whole_and_its_trailers_are_dropped(size: int) -> None:
    one = protocol()
    data = CHUNKED + b"1;x\r\na\r\n" * 40_000 + b"0\r\nconnection: close\r\n\r\n"
    for at in range(0, len(data), size):
        one.data_received(data[at : at + size])
    assert (bytes(one.cycle.body), one.cycle.more_body) == (b"a" * 40_000, False)
    assert [name for name, _ in one.scope["headers"]] == [b"host", b"transfer-encoding"]
    assert not one.transport.closed


@pytest.mark.parametrize("body", [b"a" * 10, CHUNKED])
def test_a_body_that_is_not_whole_in_time_is_cut_off(body: bytes) -> None:
    one = protocol()
    one.data_received(CHUNKED + b"5\r\naaa" if body is CHUNKED else DEAF + b"\r\n\r\n" + body)
    one.data_received(b"a")
    assert one.loop.fire() == one.body_seconds
    assert one.transport.closed
    assert said(one) == (408, {"message": "the request did not come in time", "type": "invalid_request_error",
                               "param": None, "code": None})  # fmt: skip


def test_a_body_that_waits_for_an_earlier_answer_has_its_time_afterwards() -> None:
    one = protocol()
    one.data_received(DEAF + b"\r\n\r\n" + BODY[:24] + DEAF + b"\r\n\r\n" + BODY[:5])
    assert len(one.pipeline) == 1
    assert one.loop.fire() == one.body_seconds
    assert not one.transport.closed
    one.cycle, second = one.pipeline[0][0], one.cycle
    answer(one)
    one.cycle = second
    one.loop.fire()
    assert one.transport.closed


def test_a_connection_that_is_idle_for_long_is_closed() -> None:
    one = protocol()
    one.data_received(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    answer(one)
    assert one.loop.fire() == CONFIG.timeout_keep_alive
    assert one.transport.closed


def test_what_is_no_http_is_an_error_object() -> None:
    one = protocol()
    one.data_received(b"hello\r\n\r\n")
    assert said(one) == (400, {"message": "the request is no HTTP/1.1", "type": "invalid_request_error",
                               "param": None, "code": None})  # fmt: skip


def test_connections_without_a_request_make_room_the_longest_first() -> None:
    seats = Connections(100)
    assert seats.most == 50
    ones = [protocol(seats) for _ in range(50)]
    ones[0].data_received(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    ones[1].data_received(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    answer(ones[1])  # it waits from now on
    ones[2].data_received(DEAF + b"\r\n\r\n" + BODY[:5])  # of which the client may never send the rest
    ones += [protocol(seats) for _ in range(3)]
    assert [at for at, one in enumerate(ones) if one.transport.closed] == [2, 3, 4]
    assert not any(CROWDED in one.app_state for one in ones)
    for one in ones:
        if one.transport.closed:
            one.connection_lost(None)


def test_where_all_are_answered_a_few_connections_are_left_for_probes() -> None:
    seats = Connections(64)
    ones = [protocol(seats) for _ in range(seats.most)]
    for one in ones:
        one.data_received(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    probes = []
    for _ in range(http_protocol._FOR_PROBES + 2):
        probe = protocol(seats)
        probe.data_received(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        probes.append(probe)
    assert [probe.transport.closed for probe in probes] == [False] * http_protocol._FOR_PROBES + [True] * 2
    assert all(probe.scope["state"] == {CROWDED: True} and not probe.cycle.keep_alive for probe in probes)
    assert not any(one.transport.closed for one in ones)
    for probe in (probes[0], *probes[-2:]):
        probe.connection_lost(None)
    assert not protocol(seats).transport.closed


def behind_tls(limits: type[BoundedHttp], folder: Path) -> Any:
    (file := folder / "both.pem").write_text(CERTIFICATE)
    return with_tls(limits, str(file), None)


LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def eof(reader: asyncio.StreamReader) -> bool:
    """Whether the server has closed it; waits until it has."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"])
def test_connections_whose_handshake_does_not_end_make_room_too(tmp_path: Path, said: bytes, loop: Any) -> None:
    limits = BoundedHttp.within(30.0, 30.0, 40)
    credulous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    credulous.check_hostname, credulous.verify_mode = False, ssl.CERT_NONE

    async def body() -> None:
        async with served() as client, listening(client, behind_tls(limits, tmp_path)) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(limits.seats.most + 5)]
            for _, writer in silent:
                writer.write(said)
            assert all(await asyncio.gather(*(eof(reader) for reader, _ in silent[:5])))
            assert len(limits.seats._open) == limits.seats.most
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=credulous)
                writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert (await reader.readline()).split()[1] == b"200"
                writer.close()
            assert not silent[-1][0].at_eof()
            for _, writer in silent:
                writer.close()
            await client.until(lambda: not limits.seats._open)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(body())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_handshake_that_fails_or_takes_too_long_holds_nothing(tmp_path: Path, loop: Any) -> None:
    limits = BoundedHttp.within(0.2, 30.0, 40)

    async def body() -> None:
        async with served() as client, listening(client, behind_tls(limits, tmp_path)) as port:
            for said in (b"GET / HTTP/1.1\r\n\r\n", b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                while await reader.read(1 << 10):
                    pass
                writer.close()
            await client.until(lambda: not limits.seats._open)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(body())
