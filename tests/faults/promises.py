"""What is promised of a job in which something goes wrong, held against what happened.

Knows: every promise, and how each is checked on an Outcome and on the files. Does not know: how a job is run (job.py).
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.cli import parse
from launch.generate.command import run as generate
from launch.generate.options import Command
from launch.generate.output_file import ResultsFile
from launch.ranks.start_engine import open_engine
from tests.faults.cases import Case, Fault, Phase
from tests.faults.job import LEFTOVERS, REQUESTS, Outcome, options, write_files
from tests.launch.generate.batches import answers_of, rows_of

# Faults whose culprit is not named, and why. Everything else must be.
UNNAMED: dict[Case, str] = {}


@dataclass(frozen=True, slots=True)
class Reference:
    """What one rank alone answers to the same requests."""

    answers: dict[str, Any]

    @classmethod
    def make(cls, folder: Path) -> Reference:
        write_files(folder)
        _generate_alone(folder)
        return cls(answers_of(folder / "out.jsonl"))


def broken(case: Case, outcome: Outcome, folder: Path, reference: Reference, slack: float = 1.0) -> list[str]:
    """Each promise that was not kept, in words. ``slack`` multiplies the times, on a machine that others use too."""
    found = [*_end(case, outcome, slack), *_traces(outcome)]
    if case.ends_job:
        found += _names(case, outcome)
        found += _bundles(case, outcome, folder)
    found += _results(case, outcome, folder, reference)
    return found


def _end(case: Case, outcome: Outcome, slack: float) -> list[str]:
    if outcome.seconds is None:
        return [f"the fault did not happen: exit code {outcome.code}"]
    if outcome.code is None:
        return ["the job did not end"]
    if not case.ends_job:
        return [] if outcome.code == 0 else [f"exit code {outcome.code}, though nothing was to end the job"]
    found = [] if outcome.code != 0 else ["exit code 0"]
    promised = case.limit + slack * (case.promised - case.limit)
    if outcome.seconds > promised:
        found.append(f"the job ended after {outcome.seconds:.1f} s, promised are {promised:g}")
    return found


def _traces(outcome: Outcome) -> list[str]:
    found = [f"{LEFTOVERS:g} s later there is still process {process}" for process in outcome.left]
    return found + [f"socket {path} is left" for path in outcome.sockets]


def _names(case: Case, outcome: Outcome) -> list[str]:
    named = outcome.culprit == case.rank and f"ends the job: rank {case.rank} " in outcome.said
    if named == (case not in UNNAMED):
        return []
    return [f"rank {outcome.culprit} is named: {None if outcome.summary is None else outcome.summary['text']}"]


def _bundles(case: Case, outcome: Outcome, folder: Path) -> list[str]:
    found = [] if outcome.summary is not None else ["there is no summary"]
    for rank in case.survivors:
        verdict = outcome.verdicts.get(rank)
        if verdict is None:
            found.append(f"rank {rank} left no verdict")
        elif verdict["rank"] != outcome.culprit:
            found.append(f"rank {rank} blames rank {verdict['rank']}, the summary rank {outcome.culprit}")
        for name in ("stacks.txt", *(("steps.jsonl", "collectives.jsonl") if case.phase is Phase.DECODE else ())):
            if not any(path.stat().st_size for path in (folder / "bundles").glob(f"*/rank-{rank:05d}/{name}")):
                found.append(f"rank {rank} left no {name}")
    return found


def _results(case: Case, outcome: Outcome, folder: Path, reference: Reference) -> list[str]:
    """What is in the results file is right, and running the command again makes the rest and nothing twice."""
    output = folder / "out.jsonl"
    before = output.read_bytes() if output.exists() else b""  # a job that never began
    whole = before[: before.rfind(b"\n") + 1]
    if case.fault is Fault.DISK and case.rank == 0 and whole != before:
        return ["a row was left unfinished by a full disk"]
    with ResultsFile(output) as results:
        if results.repaired_bytes != len(before) - len(whole):
            return [f"{results.repaired_bytes} bytes were cut off, {len(before) - len(whole)} were torn"]
    rows = len(rows_of(output))
    if not case.ends_job and rows != REQUESTS:
        return [f"{rows} of {REQUESTS} rows, though nothing was to end the job"]
    if rows < REQUESTS:
        _generate_alone(folder)
    if not output.read_bytes().startswith(whole):
        return ["going on changed rows that were there"]
    if answers_of(output) != reference.answers:
        wrong = {key for key, answer in answers_of(output).items() if reference.answers.get(key) != answer}
        return [f"answers differ from those of one rank alone: {sorted(wrong)} of {rows} rows written before the end"]
    return []


def _generate_alone(folder: Path) -> None:
    """The same command on one rank, in this process."""
    with contextlib.redirect_stdout(io.StringIO()):
        command = parse(options(folder))
        assert isinstance(command, Command)
        code = generate(command, {}, open_engine)
    if code != 0:
        raise AssertionError(f"generate on one rank ended with {code}")
