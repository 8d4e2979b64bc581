"""Runs one job of four ranks with a fault in it, and says what became of it.

Knows: how a job is started (torchrun, or ranks alone as srun starts them), its processes, sockets and files, the clock.
Does not know: which faults there are and what they must lead to (cases.py, promises.py), how they are made (rank.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import IO, Any

from runtime.watchdog.parent_death import die_with_parent
from tests.faults.cases import LIMIT, WORLD
from tests.faults.rank import NOTE
from tests.faults.zygote import Launcher, Zygote
from tests.runtime.engine.rig import VOCABULARY, tiny_folder

ROOT = Path(__file__).parents[2]
REQUESTS = 16
PATIENCE = 300.0  # seconds after which a job that does not end is a failure of the test
LEFTOVERS = 2.0  # seconds that processes may outlive their launcher
_MARK = "LOCKSTRIDE_FAULT_JOB"
Launched = subprocess.Popen[bytes] | Launcher


def write_files(folder: Path) -> None:
    """A tiny model and some requests: prompts that take several prefill steps, answers of all lengths."""
    tiny_folder(folder / "model")
    lines = []
    for i in range(REQUESTS):
        prompt = [(7 * i + 3 * j + 1) % VOCABULARY for j in range(24 + i % 20)]
        line = {"id": f"r{i}", "prompt_token_ids": prompt, "max_tokens": 3 + 7 * i % 30, "ignore_eos": True}
        lines.append(json.dumps(line | {"temperature": 0.0}))
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def options(folder: Path, bundles: str = "bundles") -> list[str]:
    """`generate` over the files of ``folder``."""
    given = {
        "model": folder / "model",
        "input": folder / "in.jsonl",
        "output": folder / "out.jsonl",
        "bundles": folder / bundles,
        "load-format": "dummy",
        "device": "cpu",
        "max-num-seqs": 8,
        "block-size": 8,
        "max-model-len": 128,
        "num-blocks": 200,
        "max-num-batched-tokens": 64,
        "decode-buckets": 8,
        "control-timeout-s": LIMIT,
    }
    return ["generate", *(text for name, value in given.items() for text in (f"--{name}", str(value)))]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job. ``ranks_gone`` and ``seconds`` are seconds from the fault to the end of the last rank and
    of the launcher, None when the fault did not happen. ``left``: processes of the job that outlived it by LEFTOVERS.
    """

    code: int | None
    ranks_gone: float | None
    seconds: float | None
    left: tuple[str, ...]
    sockets: tuple[str, ...]
    said: str
    summary: dict[str, Any] | None
    verdicts: dict[int, dict[str, Any]]

    @property
    def culprit(self) -> int | None:
        return None if self.summary is None else self.summary["culprit"]


class Job:
    """Files, sockets and processes of one job. Use as a context: nothing of it is left afterwards."""

    def __init__(self, folder: Path, case: str) -> None:
        self.folder = folder
        self.case = case
        self.sockets = Path(tempfile.mkdtemp(prefix="ls-"))  # short: the path of a Unix socket is
        self._session = -1
        self._launched: Launched | None = None
        self._said: list[bytes] = []
        self._id = uuid.uuid4().hex
        self.environ = {
            **os.environ,
            _MARK: self._id,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(self.sockets),
        }
        for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
            self.environ.pop(name, None)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self._launched is not None:
            self._launched.wait(PATIENCE)
        shutil.rmtree(self.sockets, ignore_errors=True)

    # ---- starting ----

    def torchrun(self, zygote: Zygote | None = None) -> Launched:
        """As from a command line; or forked from ``zygote``, and its ranks from it, which saves them the imports."""
        arguments = ["--standalone", "--nproc-per-node", str(WORLD)]
        if zygote is None:
            program = ["-m", "tests.faults.rank", *self.program()]
            return self.start([sys.executable, "-m", "torch.distributed.run", *arguments, *program])
        output = self.sockets / "said"
        os.mkfifo(output)
        arguments += ["--run-path", "--start-method", "fork", str(ROOT / "tests" / "faults" / "rank.py")]
        launcher = zygote.start([*arguments, *self.program()], self.environ, output)
        self._session, self._launched = launcher.pid, launcher
        self._listen(output.open("rb"))
        output.unlink()
        return launcher

    def program(self) -> list[str]:
        return [self.case, str(self.folder), *options(self.folder)]

    def start(self, command: list[str], **environ: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Where a limit kills the test, __exit__ does not run: a stopped rank would hold its GPU for half a minute.
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        assert process.stdout is not None
        self._session, self._launched = process.pid, process
        self._listen(process.stdout)
        return process

    def _listen(self, stream: IO[bytes]) -> None:
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._said.append(line)

    # ---- watching ----

    @property
    def said(self) -> str:
        return b"".join(self._said).decode(errors="replace")

    @property
    def fault_at(self) -> float | None:
        """When the fault happened; it may be noted again, when it shows."""
        try:
            at: float = json.loads((self.folder / NOTE).read_text())["at"]
        except (FileNotFoundError, ValueError):
            return None
        return at

    def processes(self) -> list[int]:
        """Every living process of the launcher's session (a zygote's forks), or with this job's mark (torchrun's)."""
        mark, found = f"{_MARK}={self._id}".encode(), []
        for number in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            session = session_of(number)
            if session is not None and (session == self._session or mark in _environ_of(number)):
                found.append(number)
        return found

    def wait_for_fault(self, process: Launched) -> None:
        until = time.monotonic() + PATIENCE
        while self.fault_at is None:
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the job did not come to its {self.case}:\n{self.said[-3000:]}")
            time.sleep(0.005)

    def outcome(self, process: Launched) -> Outcome:
        """Waits for the launcher's end, and looks at what it leaves."""
        ranks: set[int] | None = None
        gone_at, until = inf, time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < until:
            if ranks is None and self.fault_at is not None:
                ranks = set(self.processes()) - {process.pid}
            if ranks and all(session_of(rank) is None for rank in ranks):
                gone_at, ranks = time.monotonic(), set()
            time.sleep(0.01)
        ended = time.monotonic()
        left = self.processes()
        while left and time.monotonic() < ended + LEFTOVERS:
            time.sleep(0.01)
            left = self.processes()
        at = self.fault_at
        return Outcome(
            code=process.poll(),
            ranks_gone=None if at is None else min(gone_at, ended) - at,
            seconds=None if at is None else ended - at,
            left=tuple(_described(process) for process in left),
            sockets=tuple(str(path) for path in self.sockets.rglob("*") if not path.is_dir()),
            said=self.said,
            summary=_json(next(iter(self.bundles("summary.json")), None)),
            verdicts={
                int(path.parent.name.removeprefix("rank-")): _json(path) or {}
                for path in self.bundles("rank-*/verdict.json")
            },
        )

    def bundles(self, pattern: str) -> Iterator[Path]:
        """Files of what was left behind; each start of a job has a folder of its own."""
        return (self.folder / "bundles").glob(f"*/{pattern}")


@contextmanager
def job(folder: Path, case: str) -> Iterator[Job]:
    write_files(folder)
    with Job(folder, case) as made:
        yield made


def run(folder: Path, case: str, zygote: Zygote | None = None) -> Outcome:
    """The whole life of a job under torchrun."""
    with job(folder, case) as made:
        return made.outcome(made.torchrun(zygote))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _json(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    with suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(path.read_text())
        return content
    return None


def session_of(process: int) -> int | None:
    """None when it has ended, reaped or not."""
    try:
        state, _, _, session = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return None
    return None if state == "Z" else int(session)


def _environ_of(process: int) -> bytes:
    """As it was started with; empty for other users' processes and when it has ended."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


def _described(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        words = "?"
    return f"{process}: {words[:120]}"
