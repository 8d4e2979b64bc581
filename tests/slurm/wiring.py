"""How the hosts of a throw-away Slurm reach each other: all of them this machine, or each a network namespace.

Knows: addresses, ports, namespaces, and the words before a command that make it run on a host. Does not know: Slurm.

On loopback the nodes share one name and one address, and differ by port. In namespaces each has a name, an address and
an interface of its own, as on a real cluster; that needs root.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

HEAD = "head"
_counter = itertools.count()


class Wiring(Protocol):
    """``controller`` and ``node`` are lines for slurm.conf."""

    def set_up(self) -> None: ...
    def tear_down(self) -> None: ...
    def on(self, host: str) -> list[str]:
        """The words before a command that is to run on ``host``."""
        ...

    def link(self, host: str, *, up: bool) -> None: ...
    def controller(self) -> str: ...
    def node(self, name: str) -> str: ...


class Loopback:
    """Every host is this machine, at 127.0.0.1."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._host = socket.gethostname().split(".")[0]
        self._ports = dict(zip((HEAD, *nodes), free_ports(1 + len(nodes)), strict=True))

    def set_up(self) -> None:
        pass

    def tear_down(self) -> None:
        pass

    def on(self, host: str) -> list[str]:
        return []

    def link(self, host: str, *, up: bool) -> None:
        raise ValueError(f"{host} shares its only interface with every other host")

    def controller(self) -> str:
        return f"SlurmctldHost={self._host}(127.0.0.1)\nSlurmctldPort={self._ports[HEAD]}"

    def node(self, name: str) -> str:
        return f"NodeName={name} NodeHostname={self._host} NodeAddr=127.0.0.1 Port={self._ports[name]}"


class Namespaces:
    """Every host is a network namespace with the interface eth0, at a bridge that only they share."""

    def __init__(self, nodes: Sequence[str], folder: Path) -> None:
        self._addresses = {host: f"10.219.0.{number}" for number, host in enumerate((HEAD, *nodes), start=1)}
        self._hosts_file = folder / "hosts"
        self._tag = f"lockstride{os.getpid()}-{next(_counter)}"

    def set_up(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in self._addresses.items())]
        self._hosts_file.write_text("\n".join(lines) + "\n")
        for host in self._addresses:
            _ip("netns", "add", self._space(host))
            self._link(host, "set", "lo", "up")
        self._link(HEAD, "add", "bridge", "type", "bridge")
        self._address(HEAD, "bridge")
        for number, host in enumerate(self._addresses):
            if host != HEAD:
                other_end = ("peer", "name", "eth0", "netns", self._space(host))
                self._link(HEAD, "add", f"to{number}", "type", "veth", *other_end)
                self._link(HEAD, "set", f"to{number}", "master", "bridge", "up")
                self._address(host, "eth0")

    def tear_down(self) -> None:
        for host in self._addresses:
            subprocess.run(["ip", "netns", "del", self._space(host)], capture_output=True, check=False)

    def on(self, host: str) -> list[str]:
        # `ip netns exec` would mount /sys anew, without the cgroups that slurmd looks for.
        inside = f'mount --bind "{self._hosts_file}" /etc/hosts && hostname {host} && exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{self._space(host)}", "unshare", "--mount", "--uts"]
        return [*enter, "sh", "-c", inside, "sh"]

    def link(self, host: str, *, up: bool) -> None:
        self._link(host, "set", "eth0", "up" if up else "down")

    def controller(self) -> str:
        return f"SlurmctldHost={HEAD}({self._addresses[HEAD]})\nSlurmctldPort=6817"

    def node(self, name: str) -> str:
        return f"NodeName={name} NodeHostname={name} NodeAddr={self._addresses[name]} Port=6818"

    def _space(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def _link(self, host: str, *words: str) -> None:
        _ip("-n", self._space(host), "link", *words)

    def _address(self, host: str, interface: str) -> None:
        _ip("-n", self._space(host), "addr", "add", f"{self._addresses[host]}/24", "dev", interface)
        self._link(host, "set", interface, "up")


def free_ports(how_many: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    sockets = [socket.socket() for _ in range(how_many)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)
