"""Runs fault cases one after the other and tells what became of them: ``python -m tests.faults``.

Knows: which cases, the record of each on disk, the table. Does not know: what is promised (promises.py).

Every outcome is one line in RECORD; a case that has one is not run again, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.faults.cases import ALL, Case, Phase, dozen
from tests.faults.job import LEFTOVERS, run
from tests.faults.orphans import seconds_to_end
from tests.faults.promises import Reference, broken
from tests.faults.zygote import Zygote

NAMED_SHARE = 0.95


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="such as SIGKILL:decode:2, or a fault or phase alone (default: all)")
    parser.add_argument("--dozen", type=int, metavar="SEED", help="one case of each fault, as CI runs it")
    parser.add_argument("--forked", action="store_true", help="torchrun and ranks are forks, as in CI: quicker")
    parser.add_argument("--slack", type=float, default=1.0, help="factor on the promised times (default: 1)")
    parser.add_argument("--record", type=Path, default=Path("out/faults.jsonl"), help="(default: out/faults.jsonl)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--orphans", type=int, metavar="TIMES", help="instead: kill each kind of launcher so often")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if asked.orphans is not None:
        return _orphans(asked.orphans)
    cases = ALL if asked.dozen is None else dozen(asked.dozen)
    cases = tuple(case for case in cases if not asked.cases or _is_asked(case, asked.cases))
    asked.record.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + asked.seconds
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    zygote = Zygote(os.environ) if asked.forked else None
    try:
        reference = Reference.make(work / "reference")
        done = _read(asked.record)
        for case in cases:
            if str(case) not in done and time.monotonic() < until:
                done[str(case)] = _run(case, work / str(case), reference, zygote, asked.slack)
                with asked.record.open("a") as file:
                    file.write(json.dumps(done[str(case)]) + "\n")
    finally:
        shutil.rmtree(work)
        if zygote is not None:
            zygote.close()
    return _report([done[str(case)] for case in cases if str(case) in done], len(cases))


def _orphans(times: int) -> int:
    """Kills launchers, and tells how long ranks live on."""
    print("| killed | phase | times | last rank gone, s |\n| --- | --- | ---: | ---: |")
    slow = False
    for launcher in ("torchrun", "daemon"):
        for phase in Phase:
            seconds = []
            for _ in range(times):
                with tempfile.TemporaryDirectory(prefix="faults-") as folder:
                    seconds.append(seconds_to_end(Path(folder), launcher, phase.value, 30.0) or float("inf"))
            slow |= max(seconds) > LEFTOVERS
            print(f"| {launcher} | {phase.value} | {times} | {min(seconds):.2f} - {max(seconds):.2f} |", flush=True)
    return int(slow)


def _is_asked(case: Case, words: Iterable[str]) -> bool:
    return any(word in (str(case), *str(case).split(":")) for word in words)


def _run(case: Case, folder: Path, reference: Reference, zygote: Zygote | None, slack: float) -> dict[str, Any]:
    outcome = run(folder, str(case), zygote)
    problems = broken(case, outcome, folder, reference, slack)
    record = {
        "case": str(case),
        "fault": case.fault.value,
        "phase": case.phase.value,
        "rank": case.rank,
        "ranks_gone": outcome.ranks_gone,
        "seconds": outcome.seconds,
        "code": outcome.code,
        "culprit": outcome.culprit,
        "cause": None if outcome.summary is None else outcome.summary["cause"],
        "text": None if outcome.summary is None else outcome.summary["text"],
        "broken": problems,
        "load": os.getloadavg()[0],
        "forked": zygote is not None,
    }
    took = "no fault" if outcome.seconds is None else f"{outcome.ranks_gone:5.1f} {outcome.seconds:5.1f} s"
    print(f"{case!s:32} {took}  {'; '.join(problems) or 'kept'}", flush=True)
    if problems:
        print(outcome.said[-4000:], file=sys.stderr)
        record["said"] = outcome.said[-20_000:]
    shutil.rmtree(folder)
    return record


def _read(record: Path) -> dict[str, dict[str, Any]]:
    if not record.exists():
        return {}
    return {entry["case"]: entry for entry in map(json.loads, record.read_text().splitlines())}


def _report(records: Sequence[dict[str, Any]], asked: int) -> int:
    """The table for docs/lab/measurements/faults.md; 1 when a promise was broken or a case is missing."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["fault"], record["phase"]].append(record)
    print("\n| fault | phase | last rank gone, s | job ended, s | named | cause |")
    print("| --- | --- | ---: | ---: | --- | --- |")
    for (fault, phase), group in groups.items():
        ending = [record for record in group if record["code"] != 0]
        if not ending:
            print(f"| {fault} | {phase} | | goes on | | |")
            continue
        named = sum(record["culprit"] == record["rank"] for record in ending)
        causes = ", ".join(sorted({str(record["cause"]) for record in ending}))
        times = (_span(ending, "ranks_gone"), _span(ending, "seconds"))
        print(f"| {fault} | {phase} | {times[0]} | {times[1]} | {named} of {len(ending)} | {causes} |")
    ending = [record for record in records if record["code"] != 0]
    named = sum(record["culprit"] == record["rank"] for record in ending)
    bad = [record["case"] for record in records if record["broken"]]
    print(f"\n{len(records)} of {asked} cases; {len(ending)} ended the job, the culprit is named in {named}; {bad=}")
    few = bool(ending) and named < NAMED_SHARE * len(ending)
    return int(bool(bad) or few or len(records) < asked)


def _span(records: Sequence[dict[str, Any]], what: str) -> str:
    times = sorted(record[what] for record in records if record[what] is not None)
    return f"{times[0]:.1f} - {times[-1]:.1f}" if times else "no fault"


if __name__ == "__main__":
    sys.exit(main())
