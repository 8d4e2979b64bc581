"""Bad lines among good ones, served by the real engine: one row each, and nothing changes for the others.

python -m tests.launch.generate.bad_input --generated 20000 --long-line 100      the long form, with a line of 100 MB
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from launch.generate.command import run
from launch.generate.options import Command
from launch.ranks.start_engine import open_engine
from tests.launch.api import bad_lines
from tests.launch.api.parsed import parsed
from tests.launch.generate.batches import answers_of, good_lines, model_folder, rows_of
from tests.models.tiny_checkpoint import TINY

LONG = b"long"  # stands for a line that is written in pieces, because nobody should hold it as a whole
MEGABYTE = b"x" * 10**6
MOST_GROWTH = 50 << 20


class NotContained(AssertionError):
    """A bad line has no row, a wrong one, or one too many; or an answer is not what it is without bad lines."""


@dataclass(frozen=True)
class Contained:
    """What came of a run: error rows, answers, and how much more memory it took than the good lines alone."""

    errors: int
    answers: int
    grown_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.errors} bad lines, {self.errors} error rows with line and reason; {self.answers} answers between "
            f"them as without them; peak memory grew by {self.grown_bytes / 2**20:.1f} MiB"
        )


def serve(folder: Path, name: str, lines: Iterable[bytes]) -> tuple[int, Path]:
    """`generate` in this process, over a tiny model; the exit code and the output."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    model = model_folder(folder)
    (model / "config.json").write_text(json.dumps(TINY | {"vocab_size": 360, "eos_token_id": 0}))
    source, output = folder / f"{name}.jsonl", folder / f"{name}.out.jsonl"
    with source.open("wb") as stream:
        for line in lines:
            stream.writelines(_pieces(line))
    arguments = ["generate", "--model", str(model), "--input", str(source), "--output", str(output)]
    arguments += ["--device", "cpu", "--load-format", "dummy", "--max-model-len", "64", "--num-blocks", "80"]
    arguments += ["--block-size", "8", "--max-num-seqs", "4", "--decode-buckets", "4"]
    command = parsed(Command, arguments)
    return run(command, {}, open_engine), output


def named(number: int, line: bytes) -> bytes:
    """A hand-written line with an id of its own, so that it is refused for what is wrong with it."""
    own = str(number).encode()
    return line.replace(b'id": "x"', b'id": "h' + own + b'"')


def check(folder: Path, generated: int, good: int, long_line_mb: int = 0) -> Contained:
    """Raises NotContained."""
    right = good_lines(good)
    code, output = serve(folder, "alone", right)
    if code != 0:
        raise NotContained(f"the good lines alone ended with {code}")
    alone = answers_of(output)
    by_hand = [(named(at, line), words) for at, (line, words) in enumerate(bad_lines.HAND_WRITTEN)]
    wrong = [*by_hand, *((named(10**6 + at, line), "") for at, line in enumerate(bad_lines.generated(generated)))]
    mixed = [*wrong, *((line, None) for line in right)]
    random.Random(0).shuffle(mixed)
    if long_line_mb:
        mixed.insert(len(mixed) // 2, (LONG + str(long_line_mb).encode(), "--max-line-bytes is"))
    expected = {number: words for number, (_, words) in enumerate(mixed, 1) if words is not None}
    serve(folder, "warm", [*right, *(line for line, _ in by_hand)])
    lines = (line for line, _ in mixed)
    before = _memory_now()
    code, output = serve(folder, "mixed", lines)
    grown = _most_memory() - before
    if code != 1:
        raise NotContained(f"the run ended with {code}")
    rows = rows_of(output)
    errors = {row["error"]["line"]: row["error"] for row in rows if row.get("error")}
    answers = [row for row in rows if not row.get("error")]
    if errors.keys() != expected.keys() or len(errors) + len(answers) != len(rows) or len(rows) != len(mixed):
        raise NotContained(f"{len(rows)} rows, {len(errors)} of errors, for {len(mixed)} lines")
    for number, words in expected.items():
        message = errors[number]["message"]
        if not message or words not in message:
            raise NotContained(f"line {number} says {message!r}, without {words!r}: {mixed[number - 1][0][:200]!r}")
    found = {key: row for key, row in answers_of(output).items() if not key.startswith("error")}
    if found != alone:
        other = [key for key in alone if found.get(key) != alone[key]]
        raise NotContained(f"answers differ from those without bad lines: {other}")
    return Contained(len(errors), len(answers), grown)


def _pieces(line: bytes) -> Iterator[bytes]:
    if line.startswith(LONG):
        yield b'{"prompt": "'
        for _ in range(int(line.removeprefix(LONG))):
            yield MEGABYTE
        yield b'"}\n'
    else:
        yield line + b"\n"


def _memory_now() -> int:
    """Bytes of this process in memory, which from here on are the most it has had."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _most_memory() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", type=int, default=20_000)
    parser.add_argument("--good", type=int, default=100)
    parser.add_argument("--long-line", type=int, default=0, metavar="MB")
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        contained = check(Path(folder), options.generated, options.good, options.long_line)
    if contained.grown_bytes >= MOST_GROWTH:
        raise NotContained(f"{contained}: {MOST_GROWTH >> 20} MiB or more")
    print(f"{contained} ({time.perf_counter() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
