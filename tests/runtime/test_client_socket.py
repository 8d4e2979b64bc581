"""runtime/client_socket.py: who may take a path, and that its file never refuses.

Knows: paths in a folder of the test. Does not know: protocols.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from runtime.client_socket import listen


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))
    return True


def test_it_is_this_users_alone_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "slots.sock"
    with listen(path, 4):
        assert connects(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert [one.name for one in tmp_path.iterdir()] == ["slots.sock"]


def test_whoever_sees_the_file_can_connect(tmp_path: Path) -> None:
    """A client in a tight loop, over many starts: bound at its path first, a socket would refuse now and then."""
    ready, ends, refused = threading.Semaphore(0), threading.Event(), list[str]()
    current = [tmp_path / "0"]

    def client() -> None:
        while not ends.is_set():
            try:
                connects(current[0])
            except FileNotFoundError:
                continue
            except OSError as error:
                refused.append(str(error))
            seen = current[0]
            ready.release()
            while current[0] == seen and not ends.is_set():
                os.sched_yield()

    thread = threading.Thread(target=client)
    thread.start()
    held = []
    try:
        for turn in range(60):
            held.append(listen(current[0], 4))
            assert ready.acquire(timeout=300)
            current[0] = tmp_path / str(turn + 1)
    finally:
        ends.set()
        thread.join()
        for one in held:
            one.close()
    assert refused == []


def test_what_a_dead_process_left_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "slots.sock"
    listen(path, 1).close()
    assert path.is_socket()
    with listen(path, 1):
        with pytest.raises(OSError, match="in use") as taken:
            listen(path, 1)
        assert taken.value.errno == errno.EADDRINUSE
        assert connects(path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(OSError, match="in use"):
        listen(path, 1)
    assert path.read_text() == "mine"


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        listen(tmp_path / ("n" * 108), 1)
    with pytest.raises(FileNotFoundError):
        listen(tmp_path / "no" / "x.sock", 1)
