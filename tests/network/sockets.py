"""Which TCP sockets listen on a host, as the kernel lists them. Knows: /proc/net/tcp. Does not know: whose they are."""

from __future__ import annotations

import socket
from pathlib import Path

_LISTEN = "0A"


def listening(process: int | str = "self") -> set[tuple[str, int]]:
    """(address, port) of every listening TCP socket in the network namespace of a process."""
    found = set()
    for table, family, digits in (("tcp", socket.AF_INET, 8), ("tcp6", socket.AF_INET6, 32)):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == _LISTEN:
                words = (bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, digits, 8))
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found
