"""A process that has imported everything, and forks a torchrun for each line that it reads: ``-m tests.faults.zygote``.

Knows: forking, and what a launcher needs to be like one that was started: a session, an environment, an output.
Does not know: jobs, faults. Why: six imports of torch cost a case more than everything that it is about.

    stdin    {"arguments": [of torchrun], "environ": {...}, "output": path of a FIFO}
    stdout   the launcher's process id; then, when it has ended, its exit code
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.run

import tests.faults.rank  # noqa: F401  what ranks need is here before they are
from runtime.watchdog.parent_death import die_with_parent


class Launcher:
    """A torchrun that a zygote forked, with the part of Popen that is needed here."""

    def __init__(self, zygote: Zygote, process: int) -> None:
        self.pid = process
        self._zygote = zygote
        self._code: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        self._ended.wait(timeout)
        return self._code

    def _wait(self) -> None:
        self._code = int(self._zygote.line())
        self._ended.set()


class Zygote:
    """The side of who wants launchers; one at a time. ``close`` ends it. ``words`` stand before its command line."""

    def __init__(self, environ: Mapping[str, str], words: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*words, sys.executable, "-m", "tests.faults.zygote"],
            cwd=Path(__file__).parents[2],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, arguments: Sequence[str], environ: Mapping[str, str], output: Path) -> Launcher:
        assert self._process.stdin is not None
        order = {"arguments": list(arguments), "environ": dict(environ), "output": str(output)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Launcher(self, int(self.line()))

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        with self._process:
            self._process.kill()


def main() -> None:
    die_with_parent()
    for line in sys.stdin:
        order = json.loads(line)
        process = os.fork()
        if process == 0:
            _launch(order)
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _launch(order: dict[str, Any]) -> None:
    """Becomes torchrun; does not return."""
    code = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(order["environ"])
        output = os.open(order["output"], os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        logging.disable(logging.CRITICAL)  # torch imports its compiler to format the error of a rank that failed
        torch.distributed.run.main(order["arguments"])
        code = 0
    except BaseException as error:
        print(f"torchrun: {type(error).__name__}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
