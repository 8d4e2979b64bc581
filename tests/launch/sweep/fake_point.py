"""A point without an engine: what the tests of `sweep` run instead of `launch bench`. Quick: standard library only.

    python fake_point.py FOLDER KEY BATCH JOURNAL SECONDS

Notes its start in JOURNAL, says so when another process of its point runs too, and leaves a result that depends on its
settings alone. A batch of 13 fails, one of 14 has no rate, one of 15 hangs.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO


def note(journal: str, line: str) -> None:
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def measure(
    folder: str,
    key: str,
    batch: str,
    journal: str,
    seconds: str,
    *,
    out: TextIO = sys.stdout,
    errors: TextIO = sys.stderr,
) -> int:
    """The exit code."""
    lock = os.open(f"{journal}.{key}", os.O_RDWR | os.O_CREAT)
    try:
        return _measure_locked(lock, folder, key, batch, journal, seconds, out, errors)
    finally:
        os.close(lock)


def _measure_locked(
    lock: int, folder: str, key: str, batch: str, journal: str, seconds: str, out: TextIO, errors: TextIO
) -> int:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(journal, f"double {key}")
    note(journal, f"start {key}")
    time.sleep(float(seconds))
    print("a line on stdout", file=out)
    if batch == "13":
        print("lockstride bench: error: thirteen is too many", file=errors)
        return 2
    if batch == "15":
        time.sleep(60)
    refused = "the batch was not full" if batch == "14" else None
    rate = None if refused else 10.0 * int(batch)
    row = {"kind": "latency", "hw": "cpu", "model": "m", "precision": "float32", "tp": 1, "ep": 1, "batch": int(batch)}
    row |= {"input_len": 16, "output_len": 9, "chain_depth": 2, "runs": 1, "refused": refused, "tok_s": rate}
    row |= {"tpot_ms": None if refused else 100.0, "tok_s_per_gpu": rate, "tok_s_per_user": None if refused else 10.0}
    Path(folder, "results", "latency-m-tp1.points.jsonl").write_text(json.dumps(row) + "\n")
    note(journal, f"end {key}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(measure(*sys.argv[1:]))
