"""What an attempt at a point came to: done, or why not, from its exit code, its results and its logs.

Knows: the files that `launch bench` and torchrun leave in an attempt's folder. Does not know: the ledger.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import msgspec

LOGS = ("stderr.log", "stdout.log")
_TAIL_BYTES = 64 << 10
_OURS = re.compile(r"lockstride(?: \w+)?:(?: [\dT:-]+)? error: (.+)")  # of a command, or of slurm/job.sh
_PYTHON = re.compile(r"^(?:\[\w+\]:)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)", re.MULTILINE)
_TORCHRUN = re.compile(r"ChildFailedError|SignalException|torch\.distributed\.elastic")


def why_failed(folder: Path, exit_code: int) -> str:
    """Empty for a point that is done. ``exit_code`` is negative for a signal, as subprocess has it."""
    rows = point_rows(folder)
    refused = next((str(row["refused"]) for row in rows if row.get("refused")), "")
    if refused:
        return f"no rate: {refused}"
    if exit_code:
        return f"{_said(folder) or 'it said nothing'} ({shown_exit(exit_code)})"
    return "" if rows else "it ended well, but left no result"


def point_rows(folder: Path) -> list[dict[str, Any]]:
    """The flat rows of a point's measurements, oldest first."""
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "results").glob("*.points.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                continue  # torn: the process was killed while it wrote
    return rows


def shown_exit(exit_code: int) -> str:
    """``exit code 2``, ``SIGKILL``. Slurm and shells say 128 + number for a signal."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    try:
        return signal.Signals(number).name if number > 0 else f"exit code {exit_code}"
    except ValueError:
        return f"exit code {exit_code}"


def _said(folder: Path) -> str:
    """The most telling line of the logs: an error of our own, else the last exception that is not torchrun's."""
    texts = [_tail(path) for path in _log_files(folder)]
    for text in texts:
        if found := _OURS.findall(text):
            return str(found[-1]).strip()
    for text in texts:
        if found := [line for line in _PYTHON.findall(text) if not _TORCHRUN.search(line)]:
            return str(found[-1]).strip()
    lines = [line.strip() for text in texts[:1] for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _log_files(folder: Path) -> list[Path]:
    """The attempt's own log first, then those of its ranks."""
    ranks = sorted(path for pattern in ("stderr.log", "rank-*.log") for path in folder.glob(f"ranks/**/{pattern}"))
    return [path for path in (*(folder / name for name in LOGS), *ranks) if path.is_file()]


def _tail(path: Path) -> str:
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return stream.read().decode("utf-8", "replace")
