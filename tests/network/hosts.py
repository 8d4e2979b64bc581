"""Two hosts on this machine: network namespaces with names and addresses of their own, and a link between them.

Knows: namespaces, addresses, the words before a command that make it run on a host, the process that is the link
(link.py). Does not know: what runs there. Needs root, iproute2 and /dev/net/tun; no module of the kernel that shapes
traffic.

    host 0   link0  10.220.0.1 ══ link.py: delay, loss, cuts ══ 10.220.0.2  link0   host 1
             fabric 10.221.0.1 ────────────── veth ──────────── 10.221.0.2  fabric
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tests.network.link import INTERFACE, enter

FABRIC = "fabric"  # a second network between the hosts, which nothing disturbs
HOSTS = (0, 1)
_counter = itertools.count()


def lacking() -> str | None:
    """What this machine lacks for two hosts; None when it has all."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found; Debian: apt-get install iproute2 util-linux"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun: modprobe tun"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"network namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


class Counters(NamedTuple):
    """Packets that the link was given so far, and those of them that it lost."""

    carried: int
    dropped: int


class TwoHosts:
    """``with`` makes and removes them. ``seed`` picks the packets that are lost."""

    def __init__(self, seed: int = 1) -> None:
        tag = f"lockstride{os.getpid()}-{next(_counter)}"
        self._spaces = tuple(f"{tag}-host{host}" for host in HOSTS)
        self._seed = seed
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            for space in self._spaces:
                _ip("netns", "add", space)
                _ip("-n", space, "link", "set", "lo", "up")
            self._start_link()
            other_end = ("peer", "name", FABRIC, "netns", self._spaces[1])
            _ip("-n", self._spaces[0], "link", "add", FABRIC, "type", "veth", *other_end)
            for interface in (INTERFACE, FABRIC):
                for host, space in enumerate(self._spaces):
                    _ip("-n", space, "addr", "add", f"{self.address(host, interface)}/24", "dev", interface)
                    _ip("-n", space, "link", "set", interface, "addrgenmode", "none")
                    _ip("-n", space, "link", "set", interface, "txqueuelen", "10000", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: int, interface: str = INTERFACE) -> str:
        return f"10.22{0 if interface == INTERFACE else 1}.0.{host + 1}"

    def on(self, host: int) -> list[str]:
        """The words before a command that is to run on ``host``; its process becomes the command's."""
        enter_it = ["nsenter", f"--net=/run/netns/{self._spaces[host]}", "unshare", "--uts"]
        return [*enter_it, "sh", "-c", f'hostname host{host} && exec "$@"', "sh"]

    def socket_on(self, host: int, kind: socket.SocketKind = socket.SOCK_DGRAM) -> socket.socket:
        """A socket of this process that is on ``host``."""
        made: list[socket.socket] = []

        def make() -> None:
            enter(self._spaces[host])
            made.append(socket.socket(socket.AF_INET, kind))

        thread = threading.Thread(target=make)  # a thread's namespace ends with it; a socket keeps the one it has
        thread.start()
        thread.join()
        return made[0]

    def link(self, *, delay_ms: float | None = None, loss: float | None = None, cut: bool | None = None) -> Counters:
        """Changes the link at once, in what is given. ``delay_ms``: one way; ``loss``: the share of packets lost."""
        assert self._process is not None
        assert self._process.stdin is not None
        order = {"delay_ms": delay_ms, "loss": loss, "cut": cut}
        self._process.stdin.write(json.dumps({k: v for k, v in order.items() if v is not None}) + "\n")
        self._process.stdin.flush()
        return self._counters()

    def _start_link(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__).with_name("link.py")), *self._spaces, str(self._seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._counters()

    def _counters(self) -> Counters:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the link ended with {self._process.wait()}"
        return Counters(**json.loads(line))

    def _remove(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
