"""What a rank leaves when the job ends badly: one folder a rank, one summary a job.

Knows: file names, and that nothing here may hang or fail for long: the process is about to end.
Does not know: why it ends (shutdown.py passes the verdict), or what step records look like inside.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from parallel.comm.call_log import Calls
from parallel.control.errors import Verdict
from parallel.control.protocol.divergence import Recent, nothing
from runtime.watchdog.blame import Sign

STEP_RECORDS = 64
_HOOK_SECONDS = 3.0


def no_calls() -> Calls:
    """A rank that called no collective, or keeps no log of them."""
    return Calls(0, 0, ())


@dataclass(slots=True)
class Evidence:
    """Where a bundle's content comes from. Everything is called from another thread than the engine's.

    ``steps``: the last step records, anything msgspec can write (or repr). ``decisions``: the digest's ring.
    ``calls``: the last collectives, as CallLog.snapshot gives them.
    ``hooks``: name -> function that writes more files into the folder, such as NCCL's flight recorder.
    """

    steps: Callable[[], Iterable[object]] = tuple
    decisions: Recent = nothing
    calls: Callable[[], Calls] = no_calls
    hooks: dict[str, Callable[[Path], None]] = field(default_factory=dict)


def rank_folder(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}"


def summary_file(directory: Path) -> Path:
    return directory / "summary.json"


def write_bundle(directory: Path, rank: int, verdict: Verdict, evidence: Evidence) -> Path | None:
    """Writes this rank's folder: stacks first, then what is known of its steps. A part that fails is left out.

    None, after a word on stderr, when there can be no folder.
    """
    folder = rank_folder(directory, rank)
    parts: dict[str, Callable[[Path], None]] = {
        "stacks.txt": _stacks,
        "verdict.json": lambda path: _json(path, verdict),
        "decisions.jsonl": lambda path: _lines(path, evidence.decisions()),
        "steps.jsonl": lambda path: _lines(path, list(evidence.steps())[-STEP_RECORDS:]),
        "collectives.jsonl": lambda path: _lines(path, evidence.calls().runs),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"lockstride: rank {rank}: no bundle: {error}", file=sys.stderr)
        return None
    for name, write in parts.items():
        try:
            write(folder / name)
        except Exception as error:  # a broken part must not cost the others
            print(f"lockstride: rank {rank}: bundle part {name} failed: {error!r}", file=sys.stderr)
    for name, hook in evidence.hooks.items():
        _bounded(name, hook, folder)
    return folder


def write_summary(directory: Path, rank: int, verdict: Verdict, signs: Mapping[int, Sign], now: float) -> Path | None:
    """The job's summary, by ``rank``: what happened, who did it, where every rank was last seen.

    None, after a word on stderr, when it cannot be written.
    """
    path = summary_file(directory)
    ranks = {
        str(number): {
            "step": sign.heartbeat.step,
            "place": sign.heartbeat.phase,
            "digest": f"{sign.heartbeat.digest:#018x}",
            "seconds_without_progress": round(sign.heartbeat.still_for + now - sign.at, 3),
            "seconds_since_sign": round(now - sign.at, 3),
            "bundle": rank_folder(Path(), number).name,
        }
        for number, sign in sorted(signs.items())
    }
    content = {
        "cause": verdict.cause.value,
        "culprit": verdict.rank,
        "step": verdict.step,
        "text": verdict.text,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ranks": ranks,
    }
    new = rank_folder(directory, rank) / path.name
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(new, path)  # what is visible is complete
    except OSError as error:
        print(f"lockstride: no summary: {error}", file=sys.stderr)
        return None
    return path


def _stacks(path: Path) -> None:
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def _json(path: Path, verdict: Verdict) -> None:
    path.write_text(json.dumps(msgspec.structs.asdict(verdict), indent=1) + "\n")


def _lines(path: Path, records: Iterable[object]) -> None:
    with path.open("wb") as file:
        for record in records:
            file.write(msgspec.json.encode(record, enc_hook=repr) + b"\n")


def _bounded(name: str, hook: Callable[[Path], None], folder: Path) -> None:
    """Runs a hook for a few seconds at most: it may ask a device that does not answer."""

    def run() -> None:
        try:
            hook(folder)
        except Exception as error:
            print(f"bundle part {name} failed: {error!r}", file=sys.stderr)

    thread = threading.Thread(target=run, name=f"bundle {name}", daemon=True)
    thread.start()
    thread.join(_HOOK_SECONDS)
