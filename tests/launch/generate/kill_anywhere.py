"""`launch generate` killed without warning at random moments, and started again until it is done.

python -m tests.launch.generate.kill_anywhere --kills 300      the long form
python -m tests.launch.generate.kill_anywhere --kills 1 --seed 4711

Runs are forked from this process, which has imported everything and started no thread, so that a kill costs a tenth of
a second and not the three of a fresh interpreter; one kill in ``--fresh-every`` is of a fresh interpreter all the same.
A moment is a time drawn from the whole life of a run, or a system call of the results file: in the middle of a write,
before or after a sync (the last one of a run among them), the repair of a torn row, the swap of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.generate.command import run
from launch.generate.options import Command
from launch.ranks.start_engine import open_engine
from tests.launch.api import bad_lines
from tests.launch.api.parsed import parsed
from tests.launch.generate import fake_main
from tests.launch.generate.batches import answers_of, good_lines, model_folder, rows_of, write_input
from tests.models.tiny_checkpoint import TINY

ROOT = Path(__file__).parents[3]
STEP_SECONDS = "0.0005"
MOST_KILLS_OF_A_RUN = 6


class KilledWrongly(AssertionError):
    """A run that was killed and resumed has lost, doubled, torn or changed a row; the text says which seed and how."""


@dataclass(frozen=True)
class Moment:
    """When a run is killed: ``after`` seconds, or in the ``count``-th call of ``call``, of which ``share`` is done."""

    kind: str
    after: float = 0.0
    call: str = ""
    count: int = 1
    share: float = 0.0


@dataclass
class Tally:
    """What the kills have hit."""

    kills: Counter[str] = field(default_factory=Counter)
    torn: int = 0
    empty: int = 0
    complete: int = 0
    runs: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({kinds}) of {self.runs} batches: {self.torn} left a torn row, {self.empty} "
            f"no row at all, {self.complete} every row; outputs equal, 0 rows lost, 0 doubled, 0 torn"
        )


class Batch:
    """Input, model and options of a run that is killed, and the answers of one that was not."""

    def __init__(self, folder: Path, real: bool, lines: int) -> None:
        self.folder, self.real = folder, real
        model = model_folder(folder)
        (model / "config.json").write_text(json.dumps(TINY | {"vocab_size": 360}))
        bad = [line for line in bad_lines.generated(lines // 4) if len(line) < 2000]
        mixed = [*good_lines(lines), *bad]
        random.Random(0).shuffle(mixed)
        source = write_input(folder, mixed)
        self.output = folder / "out.jsonl"
        self.arguments = ["generate", "--model", str(model), "--input", str(source), "--output", str(self.output)]
        self.arguments += ["--device", "cpu", "--max-num-seqs", "4"]
        if real:
            self.arguments += ["--load-format", "dummy", "--max-model-len", "64", "--num-blocks", "80"]
            self.arguments += ["--block-size", "8"]
        begin = time.perf_counter()
        self.check_end(self.wait(self.fork([], None)))
        self.seconds = time.perf_counter() - begin
        self.expected = answers_of(self.output)
        self.output.unlink()
        if len(self.expected) != len(mixed):
            raise KilledWrongly(f"the run that nobody killed has {len(self.expected)} rows for {len(mixed)} lines")

    def fork(self, options: list[str], moment: Moment | None) -> int:
        """Start a run as a process of its own that knows no moment but one in a call; returns its process id."""
        process = os.fork()
        if process:
            return process
        code = 70
        try:
            with contextlib.suppress(OSError):
                os.dup2(os.open(self.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1)
                os.dup2(1, 2)
            if moment is not None and moment.call:
                _die_in(moment)
            os.environ["FAKE_STEP_SECONDS"] = STEP_SECONDS
            command = parsed(Command, [*self.arguments, *options])
            code = run(command, {}, open_engine if self.real else fake_main.open_engine)
        finally:
            sys.stdout.flush()
            os._exit(code)

    def fresh(self, options: list[str]) -> int:
        """The same by a new interpreter."""
        module = "launch" if self.real else "tests.launch.generate.fake_main"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAKE_STEP_SECONDS": STEP_SECONDS}
        with (self.folder / "log.txt").open("wb") as log:
            command = [sys.executable, "-m", module, *self.arguments, *options]
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log).pid

    @staticmethod
    def wait(process: int) -> int:
        """The exit code, or minus the signal."""
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def check_end(self, code: int) -> None:
        """Bad lines are there, so a run that came to its end says 1."""
        if code != 1:
            raise KilledWrongly(f"the run ended with {code}:\n{(self.folder / 'log.txt').read_text()}")

    def check_between(self, before: bytes) -> bytes:
        """What a kill has left: whole rows, those of before among them, and perhaps a part of one; returns them all."""
        left = self.output.read_bytes() if self.output.exists() else b""
        if not left.startswith(before[: before.rfind(b"\n") + 1]):
            raise KilledWrongly("rows that were there before a kill are gone after it")
        return left

    def check_after(self) -> None:
        found = answers_of(self.output)  # raises for two rows of the same request
        if len(rows_of(self.output)) != len(self.expected) or found != self.expected:
            lost, more = self.expected.keys() - found.keys(), found.keys() - self.expected.keys()
            other = [key for key in found.keys() & self.expected.keys() if found[key] != self.expected[key]]
            raise KilledWrongly(f"lost {sorted(lost)}, too many {sorted(more)}, different {sorted(other)}")


def _die_in(moment: Moment) -> None:
    """Replace one function of ``os`` by one that ends this process in its ``count``-th call, or goes on as ever."""
    real: Callable[..., Any] = getattr(os, moment.call)
    left = moment.count

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            if moment.call == "write":
                data = memoryview(arguments[1])
                real(arguments[0], data[: round(moment.share * len(data))])
            elif moment.share > 0.5:
                real(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(os, moment.call, call)


def calls_of(left: bytes, retry: bool) -> tuple[str, ...]:
    """The calls that a run over such a file certainly makes, or almost: a run that has nothing to do writes nothing."""
    if not left:
        return ("write", "write", "fdatasync", "fsync")  # the folder is synced for a new file
    repair = () if left.endswith(b"\n") else ("ftruncate", "ftruncate")
    return ("write", "write", "fdatasync", *repair, *(("fsync", "replace") if retry else ()))


def draw_moment(draw: random.Random, seconds: float, calls: tuple[str, ...], fresh: bool) -> Moment:
    if fresh:
        return Moment("in a fresh interpreter", after=draw.uniform(0.0, 4.0 + seconds))
    if draw.random() < 0.5:
        return Moment("at a time", after=draw.uniform(0.0, 1.1 * seconds))
    if draw.random() < 0.15:
        return Moment("at the start", after=draw.uniform(0.0, 0.05))
    call = draw.choice(calls)
    count = draw.randrange(1, 15) if call == "write" else 1  # a short run syncs once, at its end
    return Moment(f"in {call}", call=call, count=count, share=draw.random())


def kill_and_resume(batch: Batch, draw: random.Random, kills: int, fresh: Iterator[bool], tally: Tally) -> None:
    """One batch from nothing to its end, with up to ``kills`` kills on the way."""
    batch.output.unlink(missing_ok=True)
    left = b""
    tally.runs += 1
    for _ in range(kills):
        retry = b'"error":{' in left and draw.random() < 0.3
        options = ["--retry-errors"] if retry else []
        is_fresh = next(fresh)
        moment = draw_moment(draw, batch.seconds, calls_of(left, retry), is_fresh)
        process = batch.fresh(options) if is_fresh else batch.fork(options, moment)
        if not moment.call:
            time.sleep(moment.after)
            os.kill(process, signal.SIGKILL)
        code = batch.wait(process)
        if code != -signal.SIGKILL:
            batch.check_end(code)
            break
        left = batch.check_between(b"" if retry else left)
        tally.kills[moment.kind] += 1
        tally.torn += not left.endswith(b"\n") and bool(left)
        tally.empty += b"\n" not in left
        tally.complete += left.count(b"\n") == len(batch.expected)
    else:
        batch.check_end(batch.wait(batch.fork([], None)))
    batch.check_after()


def kill_anywhere(folder: Path, kills: int, seed: int, real: bool, lines: int, fresh_every: int) -> Tally:
    """At least ``kills`` kills. Raises KilledWrongly."""
    batch, tally, draw = Batch(folder, real, lines), Tally(), random.Random(seed)

    def fresh() -> Iterator[bool]:
        number = 0
        while True:
            number += 1
            yield bool(fresh_every) and number % fresh_every == 0

    turns = fresh()
    while tally.kills.total() < kills:
        wanted = min(draw.randint(1, MOST_KILLS_OF_A_RUN), kills - tally.kills.total())
        try:
            kill_and_resume(batch, draw, wanted, turns, tally)
        except AssertionError as error:
            raise KilledWrongly(f"seed {seed}, after {tally.kills.total()} kills: {error}") from error
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=40, help="good lines of a batch; a quarter as many bad ones")
    parser.add_argument("--engine", choices=("fake", "real"), default="fake", help="real: a tiny model on this CPU")
    parser.add_argument("--fresh-every", type=int, default=10, help="0: forked runs only")
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tally = kill_anywhere(
            Path(folder), options.kills, options.seed, options.engine == "real", options.lines, options.fresh_every
        )
    print(f"{options.engine} engine: {tally} ({time.perf_counter() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
