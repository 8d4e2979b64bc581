"""A process that has imported everything, and forks a program for each line that it reads: ``-m tests.faults.zygote``.

Knows: forking, and what a program needs to be like one that was started: a session, an environment, an output.
Does not know: jobs, faults. Why: six imports of torch cost a case more than everything that it is about.

    stdin    {"module": to run, "arguments": [...], "environ": {...}, "output": path of a FIFO, "errors": of another}
    stdout   the program's process id; then, when it has ended, its exit code

Triton is not imported: whether it compiles or interprets is decided by the environment when it is. What is imported is
frozen: a fork's garbage collections, of which the start of an engine has two, do not look at it, nor copy its pages.

A launcher forks its ranks beside threads of its own: the store of the rendezvous looks up the name of whoever connects,
and libc holds a lock while it does. A rank forked in that moment finds the lock held for ever, at its first lookup. So
no rank runs, and connects, before the launcher has forked all of its own (``_fork_all_before_any_runs``).
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import logging
import os
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.run

import launch.bench.command
import launch.daemon.command
import launch.serve.command
import tests.faults.rank
from runtime.watchdog.parent_death import die_with_parent

# What ranks need is here before they are. The program imports a command when it runs it.
IMPORTED = (tests.faults.rank, launch.bench.command, launch.daemon.command, launch.serve.command)
TORCHRUN = "torch.distributed.run"


class Launcher:
    """A program that a zygote forked, with the part of Popen that is needed here."""

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

    def start(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        output: Path,
        *,
        module: str = TORCHRUN,
        errors: Path | None = None,
    ) -> Launcher:
        """``errors``: where stderr goes; to ``output`` unless given."""
        assert self._process.stdin is not None
        order = {"module": module, "arguments": list(arguments), "environ": dict(environ), "output": str(output)}
        order["errors"] = str(errors or output)
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
    faulthandler.enable()  # of what it forks, too: tests/torchrun.py asks a job that does not end where it stands
    torch.arange(1, device="meta")  # the first of a process imports sympy
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        process = os.fork()
        if process == 0:
            _run(order)
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _fork_all_before_any_runs(arguments: Sequence[str]) -> None:
    """Each rank that this launcher forks waits in its fork until there are as many as a node has."""
    ranks = int(arguments[arguments.index("--nproc-per-node") + 1])
    wait, go = os.pipe()
    forked = itertools.count(1)

    def stand_in_line() -> None:
        os.close(go)  # a launcher that dies opens the gate, too
        os.read(wait, 1)
        os.close(wait)

    def open_the_gate() -> None:
        if next(forked) % ranks == 0:
            os.write(go, bytes(ranks))

    os.register_at_fork(after_in_child=stand_in_line, after_in_parent=open_the_gate)


def _run(order: dict[str, Any]) -> None:
    """Becomes the program; does not return."""
    code = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(order["environ"])
        os.dup2(os.open(order["output"], os.O_WRONLY), 1)
        os.dup2(1 if order["errors"] == order["output"] else os.open(order["errors"], os.O_WRONLY), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if order["module"] == TORCHRUN:
            _fork_all_before_any_runs(order["arguments"])
            logging.disable(logging.CRITICAL)  # torch imports its compiler to format the error of a rank that failed
            torch.distributed.run.main(order["arguments"])
        else:
            sys.argv[1:] = order["arguments"]
            runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        if order["module"] == TORCHRUN:
            print(f"torchrun: {type(error).__name__}", file=sys.stderr)
        else:
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
