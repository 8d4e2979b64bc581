"""A head that offers another protocol, and what comes while an answer runs: as the parser and the timer see them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from launch.serve.http_protocol import MAX_HEAD_BYTES, BoundedHeaders

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"upgrade-insecure-requests: 1\r\nX-Upgrade: yes\r\nHTTP2-Settings: AAMAAABkAAQBAAAA\r\nContent-Length: 24"
)
BODY = b'{"prompt": "\nupgrade: 1"}\nup'
DEAF = HEAD.replace(b"\r\nUpgrade: h2c", b"\r\nnoffer-: h2c")


def protocol(*, response_complete: bool = True) -> Any:
    """As much of one as has no connection."""
    made: Any = BoundedHeaders.__new__(BoundedHeaders)
    made.cycle = SimpleNamespace(response_complete=response_complete)
    made.timers = []
    made.loop = SimpleNamespace(call_later=lambda seconds, call: made.timers.append((seconds, call)))
    made.written, made.closed = b"", False
    made.transport = SimpleNamespace(is_closing=lambda: made.closed, write=made.__dict__.setdefault("out", []).append)
    made.transport.close = lambda: setattr(made, "closed", True)
    made._held = made._tail = b""
    made._in_head, made._head_bytes, made._head_timer = True, 0, None
    return made


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
        if not one.closed:
            one.data_received(piece)
    if size > MAX_HEAD_BYTES:
        assert one.out[0].startswith(b"HTTP/1.1 431 ")
        assert b"b" not in b"".join(parsed)
    else:
        assert b"".join(parsed) == head + b"b" * 200_000
        assert not one.closed


def test_a_head_that_begins_beside_an_answer_does_not_cut_it_off() -> None:
    one = protocol(response_complete=False)
    one._give_up()
    assert not one.closed
    ((seconds, again),) = one.timers
    assert seconds == one.seconds
    one.cycle.response_complete = True
    again()
    assert one.closed
    assert one.out[0].startswith(b"HTTP/1.1 408 ")
