"""Tests that compute floats, as other machines would run them: ``python -m tests.portable [-n WORKERS] [--only TEXT]``.

Runs FOLDERS once for each vector width that this CPU has, then once with four threads an operator beside as many
processes that never rest as there are workers. Other widths and threads sum in another order, so that the last bits of
a product differ; a busy machine lets threads and ranks come in another order. GPUs are out of sight. Further arguments
are pytest's. Exit code 0 when all runs passed; ``--only busy`` makes those whose name has that in it.

It runs with whatever Python it is started with. Test files that need a package which that one lacks are left out and
named. Without pytest-xdist (or with ``-n 1``) the tests run one after the other.

Knows: the variables that torch reads. Does not know: what is tested.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

FOLDERS = (
    "tests/models",
    "tests/runtime",
    "tests/parallel/comm",
    "tests/parallel/layers",
    "tests/launch",
    "tests/faults",
    "tests/bench",
    "tests/docs/test_embedding.py",
    "tests/test_plant.py",
)
NO_FLOATS = ("tests/models/kernels/test_compiled_kernels.py",)  # compiles for another machine, and runs nothing
_WIDTHS_X86 = ("default", "avx2", "avx512")
_ISA = ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")  # torch's own loops go by the width, these two by themselves
_LIBRARIES = {"default": ("SSE4_2", "SSE41"), "avx2": ("AVX2", "AVX2")}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the folders. ``width``: as ATEN_CPU_CAPABILITY takes it; ``busy``: processes beside it."""

    width: str
    threads: int
    busy: int = 0

    @property
    def label(self) -> str:
        beside = f", beside {self.busy} busy loops" if self.busy else ""
        return f"{self.width}, {self.threads} thread{'s' * (self.threads > 1)}{beside}"

    @property
    def environ(self) -> dict[str, str]:
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        libraries = {} if self.width not in _LIBRARIES else dict(zip(_ISA, _LIBRARIES[self.width], strict=True))
        fixed = {
            "ATEN_CPU_CAPABILITY": self.width,
            "MKL_DYNAMIC": "FALSE",
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return {**fixed, **threads, **libraries}


def widths_of(capability: str) -> tuple[str, ...]:
    """From torch.backends.cpu.get_cpu_capability(), without an ATEN_CPU_CAPABILITY: what it may be told to be."""
    best = capability.lower()
    if best in _WIDTHS_X86:
        return _WIDTHS_X86[: _WIDTHS_X86.index(best) + 1]
    return ("default", best)


def runs_of(widths: Sequence[str], busy: int = 2) -> list[Run]:
    return [*(Run(width, 1) for width in widths), Run(widths[-1], 4, busy=busy)]


def lacking(paths: Sequence[str]) -> dict[str, str]:
    """Test file -> package that it imports at its top and that this Python does not have."""
    files = [file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    found = {}
    for file in files:
        packages = re.findall(r"^(?:import|from) (\w+)", file.read_text(), re.MULTILINE)
        missing = [package for package in packages if find_spec(package) is None]
        if missing and file.name.startswith("test_"):
            found[str(file)] = missing[0]
    return found


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.portable", description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--workers", type=int, default=2, help="tests at once, and busy loops (default: 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only runs with TEXT in their name: avx2, busy")
    options, pytest_arguments = parser.parse_known_args(arguments)
    asked = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    plain = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    capability = subprocess.run([sys.executable, "-c", asked], env=plain, capture_output=True, text=True, check=True)
    left_out = lacking(FOLDERS)
    command = [sys.executable, "-m", "pytest", "-q", *(f"--ignore={path}" for path in (*NO_FLOATS, *left_out))]
    if options.workers > 1 and find_spec("xdist") is not None:
        command += ["-n", str(options.workers), "--dist", "worksteal"]
    command += pytest_arguments or FOLDERS
    results = []
    print(f"torch {torch.__version__}, {capability.stdout.strip()}, {os.cpu_count()} cores", flush=True)
    for file, package in left_out.items():
        print(f"left out, without {package}: {file}", flush=True)
    runs = runs_of(widths_of(capability.stdout.strip()), options.workers)
    for run in (run for run in runs if options.only in run.label):
        print(f"== {run.label}", flush=True)
        began = time.monotonic()
        with busy_loops(run.busy):
            code = subprocess.run(command, env={**plain, **run.environ}).returncode
        results.append((run, code, time.monotonic() - began))
    print()
    for run, code, seconds in results:
        print(f"{'passed' if code == 0 else 'FAILED'}  {seconds:6.0f} s  {run.label}")
    return int(any(code for _, code, _ in results))


if __name__ == "__main__":
    sys.exit(main())
