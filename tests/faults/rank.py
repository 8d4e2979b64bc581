"""One rank of a job, as `launch` would run it, with a fault in it.

    torchrun ... -m tests.faults.rank FAULT:PHASE:RANK FOLDER generate --model ...

The rank that the case names does in the named phase what its fault is, and notes in FOLDER/fault.json when. Everything
else is the product's own program: nothing in it knows of this file.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import launch.__main__
import launch.generate.output_file
import launch.ranks.start_engine
import runtime.build
from parallel.comm.collectives import GroupCollectives
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import LaunchSpec
from runtime.schedule.plan import StepKind
from tests.faults.cases import LIMIT, LOAD_LIMIT, Fault, Phase

NOTE = "fault.json"
PASS_BY = "pass-by"  # instead of a fault: the moment is noted, and the rank goes on slowly
_STEPS_BEFORE = {StepKind.PREFILL: 2, StepKind.DECODE: 12}  # a step that prefills beside decode rows is a prefill
_FULL_AT = 1000  # bytes that still fit into a file on a full disk
_SLOW_STEP = 0.03  # some ten times what a step takes


class Injection:
    """The fault of one rank. ``strike`` is called where the phase says."""

    def __init__(self, fault: str, folder: Path) -> None:
        self.fault = fault
        self.folder = folder
        self.slow = False
        self.armed = False

    def note(self) -> None:
        """When it happened, by the clock that all processes of this machine share."""
        (self.folder / NOTE).write_text(json.dumps({"at": time.monotonic(), "process": os.getpid()}))

    def strike(self, seconds: float) -> None:
        """``seconds``: what a slow rank may take here without being given up."""
        match self.fault:
            case Fault.OTHER | Fault.EXTRA | Fault.HANG:
                self.armed = True  # the next collective is wrong, or is never come to
            case Fault.DISK:
                self.note()
                resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_AT, resource.RLIM_INFINITY))
            case Fault.SLOW:
                self.note()
                self.slow = True
                time.sleep(seconds)
            case _:
                self.note()
                self._die()

    def _die(self) -> None:
        match self.fault:
            case Fault.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Fault.SEGV:
                ctypes.string_at(0)
            case Fault.EXIT:
                os._exit(0)
            case Fault.MEMORY:
                raise MemoryError("no room, for the sake of a test")
            case Fault.STALL:
                time.sleep(3600)
            case Fault.HELD:
                ctypes.PyDLL(None).sleep(3600)  # as a C call that keeps the interpreter's lock
            case _:
                self.slow = True

    def collective(self, all_reduce: Callable[[Any, torch.Tensor], torch.Tensor], collectives: Any, x: Any) -> Any:
        """Instead of ``all_reduce``."""
        if not self.armed:
            return all_reduce(collectives, x)
        self.armed = False
        self.note()
        if self.fault == Fault.HANG:
            time.sleep(3600)
        if self.fault == Fault.EXTRA:
            all_reduce(collectives, x.clone())
            return all_reduce(collectives, x)
        collectives.all_gather(x)
        return x


def inject(fault: str, phase: Phase, folder: Path) -> None:
    """Puts the fault where the program passes by."""
    injection = Injection(fault, folder)
    build: Any = runtime.build
    load_model, all_reduce = build.load_model, GroupCollectives.all_reduce
    step, append = Executor.launch, launch.generate.output_file.ResultsFile._append

    def loading(*arguments: Any, **options: Any) -> Any:
        if phase is Phase.LOAD:
            injection.strike(0.75 * LOAD_LIMIT)
        return load_model(*arguments, **options)

    seen = dict.fromkeys(StepKind, 0)

    def stepping(self: Executor, spec: LaunchSpec) -> None:
        plan = spec.plan
        kind = StepKind.PREFILL if plan.chunks else StepKind.DECODE
        if kind.name.lower() == phase.value:
            seen[kind] += 1
            if seen[kind] == _STEPS_BEFORE[kind]:
                injection.strike(0.75 * LIMIT)
        if injection.slow:
            time.sleep(_SLOW_STEP)
        step(self, spec)

    def appending(self: Any, data: bytes) -> None:
        try:
            append(self, data)
        except OSError:  # this is when the fault shows
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            injection.note()
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_AT, resource.RLIM_INFINITY))
            raise

    build.load_model = loading
    replaced: list[tuple[type, str, Callable[..., Any]]] = [
        (Executor, "launch", stepping),
        (GroupCollectives, "all_reduce", lambda self, x: injection.collective(all_reduce, self, x)),
    ]
    if fault == Fault.DISK:
        replaced.append((launch.generate.output_file.ResultsFile, "_append", appending))
    for owner, name, function in replaced:
        setattr(owner, name, function)


def main(case: str, folder: str, *arguments: str) -> int:
    torch.set_num_threads(1)
    logging.disable(logging.NOTSET)  # a zygote's launcher is silent
    launch.ranks.start_engine.LOAD_SECONDS = float(os.environ.get("FAULT_LOAD_SECONDS", LOAD_LIMIT))
    fault, phase, rank = case.split(":")
    if rank == (os.environ.get("RANK") or os.environ["SLURM_PROCID"]):
        inject(fault.replace("-", " "), Phase(phase), Path(folder))
    try:
        return launch.__main__.main(arguments)
    except Exception:  # a forked rank's launcher would keep it to itself
        traceback.print_exc()
        raise


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
