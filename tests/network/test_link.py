"""The link that the other tests stand on: it carries everything, in order, as late and as seldom as it is told."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.network.hosts import HOSTS, TwoHosts

pytestmark = pytest.mark.multiprocess

PORT = 5000


@contextmanager
def ends(hosts: TwoHosts) -> Iterator[list[socket.socket]]:
    """A UDP socket on each host."""
    made = [hosts.socket_on(host) for host in HOSTS]
    with closing(made[0]), closing(made[1]):
        for host, end in zip(HOSTS, made, strict=True):
            end.bind((hosts.address(host), PORT))
            end.settimeout(30)
        yield made


def send(hosts: TwoHosts, ends: list[socket.socket], sender: int, packets: range) -> None:
    for number in packets:
        ends[sender].sendto(number.to_bytes(4), (hosts.address(1 - sender), PORT))


def received(end: socket.socket, packets: int) -> list[int]:
    return [int.from_bytes(end.recv(100)) for _ in range(packets)]


@pytest.mark.parametrize("delay_ms", [0.0, 5.0, 50.0])
def test_packets_come_in_order_and_not_before_their_time(hosts: TwoHosts, delay_ms: float) -> None:
    before = hosts.link(delay_ms=delay_ms)
    with ends(hosts) as both:
        for sender in HOSTS:
            sent = time.monotonic()
            send(hosts, both, sender, range(100))
            assert received(both[1 - sender], 1) == [0]
            assert time.monotonic() - sent >= delay_ms / 1e3
            assert received(both[1 - sender], 99) == list(range(1, 100))
    after = hosts.link()
    assert (after.carried - before.carried, after.dropped) == (200, before.dropped)


def test_a_share_of_the_packets_is_lost(hosts: TwoHosts) -> None:
    before = hosts.link(loss=0.5)
    with ends(hosts) as both:
        send(hosts, both, 0, range(200))
        while hosts.link().carried < before.carried + 200:
            pass
        lost = hosts.link(loss=0.0).dropped - before.dropped
        assert 40 < lost < 160  # eight standard deviations
        send(hosts, both, 0, range(200, 201))
        came = received(both[1], 201 - lost)
        assert came == sorted(came)
        assert came[-1] == 200


def test_nothing_passes_a_cut_not_even_what_was_under_way(hosts: TwoHosts) -> None:
    before = hosts.link(delay_ms=60_000)
    with ends(hosts) as both:
        send(hosts, both, 0, range(10))
        while hosts.link().carried < before.carried + 10:
            pass
        hosts.link(delay_ms=0, cut=True)
        send(hosts, both, 0, range(10, 20))
        while hosts.link().carried < before.carried + 20:
            pass
        assert hosts.link(cut=False).dropped - before.dropped == 20
        send(hosts, both, 0, range(20, 21))
        assert received(both[1], 1) == [20]


def test_a_stream_survives_loss(hosts: TwoHosts) -> None:
    """TCP over it is TCP as everywhere."""
    hosts.link(loss=0.01)
    piece = bytes(range(256)) * 64
    with (
        closing(hosts.socket_on(0, socket.SOCK_STREAM)) as server,
        closing(hosts.socket_on(1, socket.SOCK_STREAM)) as c,
    ):
        server.bind((hosts.address(0), PORT))
        server.listen()
        c.connect((hosts.address(0), PORT))
        accepted, _ = server.accept()
        with closing(accepted), accepted.makefile("rb") as stream:
            accepted.settimeout(60)
            for _ in range(30):
                c.sendall(piece)
                assert stream.read(len(piece)) == piece
