"""What the jobs of these tests do: `launch generate` on the demo model, from a file of short greedy prompts.

Knows: how a job is submitted with the files of slurm/ as they are, and what its rows must say. Does not know: what
happens to the job meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm.cluster import Cluster, wait_until

ROOT = Path(__file__).parents[2]
LINES = 20  # of which the last are seconds away when the job is CAUGHT in the middle
CAUGHT = 3
FEW = 8
_WORDS = ("add", "read", "find", "close", "items", "name", "path", "parse", "index", "merge")

SMALL = ["--model", str(ROOT / "models/demo"), "--device", "cpu", "--dtype", "float32", "--max-model-len", "128"]
SMALL += ["--num-blocks", "128", "--max-num-seqs", "2"]


def write_prompts(path: Path, lines: int = LINES) -> None:
    rows = [
        {"id": f"r{i}", "prompt": f"def {_WORDS[i % 10]}_{i}(self):", "max_tokens": 8 + i % 9, "temperature": 0}
        for i in range(lines)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def environment(**more: str) -> dict[str, str]:
    """For jobs: this interpreter, few threads, the shipped site.env."""
    return {"OMP_NUM_THREADS": "1", "LOCKSTRIDE_PYTHON": sys.executable, "LOCKSTRIDE_ROOT": str(ROOT), **more}


def answers(path: Path) -> dict[str, list[int]]:
    """Token ids by request id. Fails on a torn row, on an error row, and on a second row of one request."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["id"]: row["token_ids"] for row in rows}
    assert len(found) == len(rows), "a request has two rows"
    return found


def serial_answers(folder: Path) -> dict[str, list[int]]:
    """What one rank without Slurm says."""
    write_prompts(folder / "in.jsonl")
    command = [sys.executable, "-m", "launch", "generate", *SMALL, "--input", "in.jsonl", "--output", "out.jsonl"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr
    return answers(folder / "out.jsonl")


def _module_of(command_line: bytes) -> str:
    """Of ``python -u -m MODULE ...``; empty for other programs, such as an srun that starts it."""
    program, *words = command_line.decode(errors="replace").split("\0")
    while words and words[0] == "-u":
        words.pop(0)
    return words[1] if Path(program).name.startswith("python") and words[:1] == ["-m"] else ""


@dataclass
class GenerateJob:
    """One job in a folder of its own, which is where it is submitted."""

    cluster: Cluster
    folder: Path
    expected: dict[str, list[int]]
    variables: dict[str, str] = field(default_factory=dict)
    id: str = ""

    def submit(self, *sbatch: str, options: tuple[str, ...] = (), script: Path | None = None) -> str:
        """``sbatch`` are its options, ``options`` those of generate. Returns the job's id."""
        if not (self.folder / "in.jsonl").exists():
            write_prompts(self.folder / "in.jsonl", len(self.expected))
        command = ["sbatch", "--parsable", "--output=job.out", *sbatch, str(script or ROOT / "slurm/generate.sbatch")]
        command += [*SMALL, "--input", "in.jsonl", "--output", "out.jsonl", *options]
        self.id = self.cluster.run(*command, environment=environment(**self.variables), cwd=self.folder).strip()
        return self.id

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def said(self) -> str:
        """Everything in the job's output file and in the logs of its ranks, for assertions and their messages."""
        files = [self.folder / "job.out", *sorted((self.folder / "slurm-logs").rglob("*.log"))]
        return "\n".join(f"==> {path.name} <==\n{path.read_text()}" for path in files if path.exists())

    def processes(self, module: str = "", **variables: str) -> list[int]:
        """Its processes on this machine, by their environments; of Pythons those started with ``-m module``."""
        variables |= {"SLURM_JOB_ID": self.id, "SLURM_CONF": self.cluster.environment["SLURM_CONF"]}
        wanted = {f"{name}={value}".encode() for name, value in variables.items()}
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                ours = wanted <= set((entry / "environ").read_bytes().split(b"\0"))
                if ours and (not module or _module_of((entry / "cmdline").read_bytes()) == module):
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended, or is another user's
        return found

    def ranks(self, **variables: str) -> list[int]:
        return self.processes("launch", **variables)

    def wait_for_the_end_of_processes(self, seconds: float = 60) -> None:
        wait_until(lambda: not self.processes(), "the end of all processes", seconds)

    def rows(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def wait_for_rows(self, rows: int = CAUGHT, seconds: float = 180) -> None:
        def there() -> bool:
            assert not self.cluster.job(self.id).ended, f"the job ended before it was caught\n{self.said}"
            return self.rows() >= rows

        wait_until(there, f"{rows} rows", seconds, every=0.05)

    def end(self) -> None:
        """Whatever a failed test has left in the queue."""
        if self.id and not self.cluster.job(self.id).ended:
            with contextlib.suppress(AssertionError):  # it may end by itself meanwhile
                self.cluster.run("scancel", self.id)
            self.cluster.wait_for_job(self.id)

    def check_answers(self) -> None:
        assert answers(self.output) == self.expected, self.said
