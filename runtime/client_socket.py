"""A Unix socket for clients of the same user, which appears at its path once it can be connected to.

Knows: how a path is taken, and whose it may have been. Does not know: what is spoken there.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

_LONGEST_PATH = 107  # bytes of sockaddr_un.sun_path, its zero left out


def listen(path: Path, backlog: int) -> socket.socket:
    """A listener that this user alone may connect to. A socket file that a dead process left is replaced.

    Raises OSError: EADDRINUSE where a process answers there or the file is no socket, ENAMETOOLONG, or what the system
    says of the folder.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, f"AF_UNIX path too long: more than {_LONGEST_PATH} bytes")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # A client that waits for the file connects at once: bound there, it would refuse until it listens.
    unready = path.with_name(f".{os.getpid()}")
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        unready.unlink(missing_ok=True)
        before = os.umask(0o077)
        try:
            listener.bind(str(unready))
        finally:
            os.umask(before)
        unready.chmod(0o700)
        listener.listen(backlog)
        try:
            os.link(unready, path)  # unlike a rename it never replaces a file
        except FileExistsError as error:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from error
        finally:
            unready.unlink(missing_ok=True)
    except OSError:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
