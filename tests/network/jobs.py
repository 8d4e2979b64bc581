"""`launch generate` or `daemon` on two hosts with two ranks each, started as a person would: torchrun on either, with
static rendezvous.

Knows: how the two launchers are started and told of each other, the job's processes, sockets and files. Does not know:
what the link does meanwhile (hosts.py), what must come of it (test_two_nodes.py).
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launch.__main__ import main
from tests.faults.job import ROOT, session_of
from tests.faults.rank import NOTE
from tests.faults.zygote import Launcher, Zygote
from tests.launch.generate.batches import answers_of
from tests.network.hosts import HOSTS, TwoHosts
from tests.network.link import INTERFACE
from tests.runtime.engine.rig import TINY, VOCABULARY, tiny_folder

RANKS = 2  # on each host
PATIENCE = 120.0  # seconds after which a job that does not end is a failure of the test
LEFTOVERS = 2.0  # seconds that processes may outlive their launcher
_ports = itertools.count(29_500)  # the hosts are ours alone


def write_files(folder: Path, requests: int, tokens: int, model: Path | None = None) -> None:
    """A model of one layer, or a copy of ``model``; ``requests`` greedy requests, each for up to ``tokens`` tokens."""
    if model is not None:
        shutil.copytree(model, folder / "model")
    else:
        (tiny_folder(folder / "model") / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 1}))
    lines = []
    for i in range(requests):
        prompt = [(7 * i + 3 * j + 1) % VOCABULARY for j in range(5 + i)]
        line = {"id": f"r{i}", "prompt_token_ids": prompt, "max_tokens": 1 + (tokens - 1) * (i + 1) // requests}
        lines.append(json.dumps(line | {"ignore_eos": True, "temperature": 0.0}))
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def options(folder: Path, more: Sequence[str] = (), command: str = "generate") -> list[str]:
    """`generate` over the files of ``folder``, or another command over its model; ``more``: its own options."""
    files = {"input": folder / "in.jsonl", "output": folder / "out.jsonl"} if command == "generate" else {}
    given = {
        **files,
        "model": folder / "model",
        "bundles": folder / "bundles",
        "load-format": "safetensors" if (folder / "model" / "model.safetensors").exists() else "dummy",
        "device": "cpu",
        "dtype": "float32",
        "max-num-seqs": 8,
        "block-size": 8,
        "max-model-len": 128,
        "num-blocks": 200,
        "decode-buckets": 8,
    }
    return [command, *(text for name, value in given.items() for text in (f"--{name}", str(value))), *more]


def answers_alone(folder: Path) -> dict[str, Any]:
    """What one rank answers to the files of ``folder``, in this process; the output is removed again."""
    before = logging.getLogger().level
    code = main(options(folder))
    logging.getLogger().setLevel(before)
    assert code == 0, f"generate on one rank ended with {code}"
    found = answers_of(folder / "out.jsonl")
    (folder / "out.jsonl").unlink()
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: of each host its launcher's exit code and when it ended (monotonic), and all that it said.

    ``left``: processes of the job that outlived it by LEFTOVERS.
    """

    codes: tuple[int | None, ...]
    ended_at: tuple[float, ...]
    said: tuple[str, ...]
    left: tuple[int, ...]


class TwoNodeJob:
    """A job in a folder of its own. Use as a context: none of its processes is left afterwards."""

    def __init__(self, hosts: TwoHosts, zygotes: Sequence[Zygote], folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.sockets = Path(tempfile.mkdtemp(prefix="ls-"))  # short: the path of a Unix socket is
        self.port = next(_ports)
        self._zygotes = zygotes
        self._launchers: list[Launcher] = []
        self._said: list[list[bytes]] = [[] for _ in HOSTS]

    def __enter__(self) -> TwoNodeJob:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for launcher in self._launchers:
            launcher.wait(PATIENCE)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def start(self, *more: str, pace: str = "quick", interface: str = INTERFACE, command: str = "generate") -> None:
        """Both launchers; ``more`` are options of the command, ``interface`` is the network of the activations."""
        words = options(self.folder, more, command)
        program = [str(ROOT / "tests" / "network" / "rank.py"), pace, str(self.folder), *words]
        place = ["--master-addr", self.hosts.address(0), "--master-port", str(self.port)]
        place += ["--nnodes", str(len(HOSTS)), "--nproc-per-node", str(RANKS), "--start-method", "fork", "--run-path"]
        for host in HOSTS:
            directory = self.sockets / str(host)
            directory.mkdir()
            output = directory / "said"
            os.mkfifo(output)
            environ = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": interface,
                "XDG_RUNTIME_DIR": str(directory),
            }
            for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
                environ.pop(name, None)
            launcher = self._zygotes[host].start(["--node-rank", str(host), *place, *program], environ, output)
            self._launchers.append(launcher)
            threading.Thread(target=_read, args=(output.open("rb"), self._said[host]), daemon=True).start()

    @property
    def said(self) -> tuple[str, ...]:
        return tuple(b"".join(lines).decode(errors="replace") for lines in self._said)

    @property
    def running(self) -> bool:
        return any(launcher.poll() is None for launcher in self._launchers)

    def launchers(self) -> list[int]:
        return [launcher.pid for launcher in self._launchers]

    def processes(self) -> list[int]:
        """Every living process of the launchers' sessions."""
        sessions = set(self.launchers())
        numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [number for number in numbers if session_of(number) in sessions]

    def wait_until_it_decodes(self) -> None:
        self._wait_for((self.folder / NOTE).exists, "decoding")

    def wait_for_rows(self, rows: int) -> None:
        output = self.folder / "out.jsonl"
        self._wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= rows, f"{rows} rows")

    def outcome(self) -> Outcome:
        """Waits for the end of both launchers, and looks at what they leave."""
        ended_at: dict[int, float] = {}
        until = time.monotonic() + PATIENCE
        while len(ended_at) < len(HOSTS) and time.monotonic() < until:
            for host, launcher in enumerate(self._launchers):
                if host not in ended_at and launcher.poll() is not None:
                    ended_at[host] = time.monotonic()
            time.sleep(0.01)
        left, until = self.processes(), time.monotonic() + LEFTOVERS
        while left and time.monotonic() < until:
            time.sleep(0.01)
            left = self.processes()
        codes = tuple(launcher.poll() for launcher in self._launchers)
        return Outcome(codes, tuple(ended_at.get(host, float("inf")) for host in HOSTS), self.said, tuple(left))

    def check_completed(self, expected: dict[str, Any]) -> None:
        outcome = self.outcome()
        assert outcome.codes == (0, 0), "\n".join(outcome.said)
        assert outcome.left == ()
        assert answers_of(self.folder / "out.jsonl") == expected

    def wait_until_it_listens(self, path: Path) -> None:
        """At a Unix socket; hosts share their files."""

        def listens() -> bool:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                return asking.connect_ex(str(path)) == 0

        self._wait_for(listens, str(path))

    def _wait_for(self, condition: Any, what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            alive = self.running and time.monotonic() < until
            assert alive, f"the job did not come to {what}:\n{self.said}"
            time.sleep(0.005)


@contextmanager
def zygotes_on(hosts: TwoHosts) -> Iterator[list[Zygote]]:
    """One for each host."""
    made = [Zygote({**os.environ, "OMP_NUM_THREADS": "1"}, hosts.on(host)) for host in HOSTS]
    try:
        yield made
    finally:
        for zygote in made:
            zygote.close()


def _read(stream: IO[bytes], said: list[bytes]) -> None:
    with stream:
        said.extend(stream)
