"""A link between two network namespaces that is as slow, as lossy and as broken as a test asks: ``python link.py A B``.

Knows: TUN devices, packets, the clock. Does not know: addresses (hosts.py), what travels in the packets.

One TUN device in each namespace; this process carries packets from either to the other. It is told what to do, and
answers, in lines of JSON:

    stdin    {"delay_ms": 5, "loss": 0.01, "cut": false}     any of these; {} only asks. Its end ends the process
    stdout   {"carried": packets so far, "dropped": those of them that were lost}    for each line, and one at the start

Packets of one direction keep their order. What is under way when the link is cut is lost. Standard library only: it
runs as a file, and starts at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator

INTERFACE = "link0"
_PACKET = 65_536
_BATCH = 64  # packets of one direction before the other is looked at
_CLONE_NEWNET = 0x4000_0000
_TUNSETIFF = 0x4004_54CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


def enter(namespace: str) -> None:
    """Moves the calling thread into a network namespace by its name (`ip netns`); raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns({namespace}): {os.strerror(number)}")


def open_tun(namespace: str) -> int:
    """A TUN device in ``namespace``, which is there as long as the returned descriptor; packets without a header."""
    enter(namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


class Link:
    """``delay`` in seconds, one way; ``loss`` is the share of packets that vanish, by a seed."""

    def __init__(self, ends: tuple[int, int], seed: int) -> None:
        self.delay = 0.0
        self.loss = 0.0
        self.cut = False
        self.carried = 0
        self.dropped = 0
        self._across = {ends[0]: ends[1], ends[1]: ends[0]}
        self._waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # by where they go
        self._random = random.Random(seed)

    def set(self, order: dict[str, float]) -> None:
        self.delay = order.get("delay_ms", self.delay * 1e3) / 1e3
        self.loss = order.get("loss", self.loss)
        self.cut = bool(order.get("cut", self.cut))
        if self.cut:
            for waiting in self._waiting.values():
                self.dropped += len(waiting)
                waiting.clear()

    def take(self, end: int) -> None:
        """What came out of one namespace: on its way, or lost."""
        target = self._across[end]
        waiting = self._waiting[target]
        for packet in _packets(end):
            self.carried += 1
            if self.cut or self._random.random() < self.loss:
                self.dropped += 1
            elif self.delay or waiting:
                due = time.monotonic() + self.delay
                waiting.append((max(due, waiting[-1][0]) if waiting else due, packet))
            else:
                self._deliver(target, packet)

    def deliver(self) -> float | None:
        """Hands over what is due; the seconds until more is, None when nothing is under way."""
        now = time.monotonic()
        for target, waiting in self._waiting.items():
            while waiting and waiting[0][0] <= now:
                self._deliver(target, waiting.popleft()[1])
        return min((max(waiting[0][0] - now, 0.0) for waiting in self._waiting.values() if waiting), default=None)

    def _deliver(self, target: int, packet: bytes) -> None:
        try:
            os.write(target, packet)
        except OSError:  # the device is down, or its queue full: as on any network
            self.dropped += 1


def _packets(end: int) -> Iterator[bytes]:
    for _ in range(_BATCH):
        try:
            yield os.read(end, _PACKET)
        except (BlockingIOError, OSError):  # OSError: the device is not up yet
            return


def main(first: str, second: str, seed: str) -> None:
    ends = (open_tun(first), open_tun(second))
    link = Link(ends, int(seed))
    orders, pause = b"", None
    _answer(link)
    while True:
        ready = select.select((0, *ends), (), (), pause)[0]
        for end in ends:
            if end in ready:
                link.take(end)
        pause = link.deliver()
        if 0 in ready:
            read = os.read(0, _PACKET)
            if not read:
                return
            *lines, orders = (orders + read).split(b"\n")
            for line in lines:
                link.set(json.loads(line))
                _answer(link)


def _answer(link: Link) -> None:
    os.write(1, json.dumps({"carried": link.carried, "dropped": link.dropped}).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
