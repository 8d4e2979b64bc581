"""What a run of the tests leaves behind fails it: processes, temporary files, shared memory. A pytest plugin.

A run has a name, which its processes inherit (LOCKSTRIDE_TEST_RUN), and a temporary folder of its own (TMPDIR), so
that other runs on this machine are not looked at. Shared memory has no folder for each run: what came since the run
began and no process uses counts, if it is called as torch, Python and Lockstride call it.

Knows: /proc, names of shared memory. Does not know: which test left something, or what it was for; folders of tmp_path,
which pytest keeps and clears.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

RUN = "LOCKSTRIDE_TEST_RUN"
PATIENCE_S = 120.0  # for processes that are ending, on a busy machine
SHARED = Path("/dev/shm")
SHARED_NAMES = re.compile(r"torch_|psm_|sem\.|nccl-|gloo|cuda\.shm|lockstride|ls-")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers are part of their controller's run
        config.pluginmanager.register(Leftovers())


class Leftovers:
    """Of the run that begins when this is made; looked at when the session ends, once workers have gone."""

    def __init__(self) -> None:
        outside = tempfile.gettempdir()
        self._before = {name: os.environ.get(name) for name in (RUN, "TMPDIR", "PYTEST_DEBUG_TEMPROOT")}
        self._shared = names_in(SHARED)
        within = f"{self._before[RUN]}/" if self._before[RUN] else ""  # a test's own run of tests is part of this one
        self.run = f"{within}{os.getpid()}-{secrets.token_hex(4)}"
        self.folder = Path(tempfile.mkdtemp(prefix="lt", dir=outside))  # short, as paths of sockets must be
        os.environ |= {RUN: self.run, "TMPDIR": str(self.folder)}
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outside)  # where tmp_path is
        tempfile.tempdir = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if found := self.found():
            reporter = session.config.pluginmanager.get_plugin("terminalreporter")
            if reporter is not None:
                reporter.write_line("")
                for line in found:
                    reporter.write_line(f"LEFT BEHIND: {line}", red=True)
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        for name, value in self._before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None

    def found(self) -> list[str]:
        """One line each. Processes that are about to end have PATIENCE_S."""
        until = time.monotonic() + PATIENCE_S
        while (processes := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        lines = [f"process {process}: {command}" for process, command in processes.items()]
        files = [path for path in sorted(self.folder.iterdir()) if not is_kept(path)]
        shared = names_in(SHARED) - self._shared
        return [*lines, *map(str, files), *(str(SHARED / name) for name in sorted(shared) if is_left(SHARED / name))]

    def processes(self) -> dict[int, str]:
        """Those of this run but this one, with their command lines."""
        name = f"{RUN}={self.run}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it has ended, or is another user's
                if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                    continue
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any(variable == name or variable.startswith(name + b"/") for variable in variables):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    found[int(entry.name)] = b" ".join(words).decode(errors="replace").strip()[:300]
        return found


def is_kept(path: Path) -> bool:
    """A user's folder of all control sockets, and what torch leaves: folders without a file, what a rank died of."""
    if path.name == f"lockstride-{os.geteuid()}" or path.name.startswith(("torchelastic_", "torchinductor_")):
        return not any(files for _, _, files in os.walk(path))
    return path.name.startswith("pytorch-errorfile-")


def names_in(folder: Path) -> set[str]:
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()


def is_left(path: Path) -> bool:
    """Whether shared memory is this user's, called as ours is, and no process has it mapped or open."""
    try:
        if not SHARED_NAMES.match(path.name) or path.stat().st_uid != os.geteuid():
            return False
    except FileNotFoundError:
        return False
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal() and (
                str(path).encode() in (process / "maps").read_bytes()
                or any(os.readlink(fd) == str(path) for fd in (process / "fd").iterdir())
            ):
                return False
    return True
