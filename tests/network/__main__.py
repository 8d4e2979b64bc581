"""What a link does to a job on two hosts, as the tables of docs/lab/measurements/network.md: ``python -m
tests.network``.

Knows: which links are tried and what is read off each job. Does not know: how jobs (jobs.py), turns (turns.py) and
links (hosts.py) are made. Ends with 1 when an answer differs, a cut that is too short ends a job, or a process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.faults.job import session_of
from tests.faults.zygote import Zygote
from tests.launch.generate.batches import answers_of
from tests.network.hosts import FABRIC, HOSTS, TwoHosts, lacking
from tests.network.jobs import LEFTOVERS, Outcome, TwoNodeJob, answers_alone, write_files, zygotes_on
from tests.network.link import INTERFACE
from tests.network.turns import RANKS, take_turns

LINKS = [(0.0, 0.0), (1.0, 0.0), (5.0, 0.0), (50.0, 0.0), (0.0, 0.001), (0.0, 0.01), (0.0, 0.05), (5.0, 0.01)]
CUTS = [(10.0, 1.0), (10.0, 2.0), (10.0, 4.0), (30.0, 8.0), (40.0, 11.0)]  # T, seconds of the cut
FOR_GOOD = (3.0, 10.0, 40.0)  # T
DELAYS = (0.0, 5.0, 50.0)
HORIZONS = (1, 2, 4, 8)
STEP = 0.005
TURNS = 200


class Bench:
    """Two hosts, and what went wrong so far."""

    def __init__(self, hosts: TwoHosts, zygotes: Sequence[Zygote]) -> None:
        self.hosts = hosts
        self.zygotes = zygotes
        self.wrong: list[str] = []

    @contextmanager
    def job(self, requests: int, tokens: int) -> Iterator[TwoNodeJob]:
        """With files; the link is as it should be afterwards."""
        with tempfile.TemporaryDirectory(prefix="network-") as folder:
            write_files(Path(folder), requests, tokens)
            with TwoNodeJob(self.hosts, self.zygotes, Path(folder)) as made:
                try:
                    yield made
                finally:
                    self.hosts.link(delay_ms=0, loss=0, cut=False)

    def check(self, job: TwoNodeJob, outcome: Outcome, what: str) -> None:
        """That all answers are there and right, and nothing else."""
        with contextlib.redirect_stdout(io.StringIO()):
            there = job.folder / "out.jsonl"
            found = answers_of(there)
            there.unlink()
            same = outcome.codes == (0, 0) and found == answers_alone(job.folder)
        if not same or outcome.left:
            print("\n".join(outcome.said), file=sys.stderr)
            self.wrong.append(what)

    # ---- the tables ----

    def links(self) -> None:
        print("\n| one-way delay, ms | loss | packets | lost | start to end, s | a token, ms p50 |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: |")
        for delay_ms, loss in LINKS:
            before = self.hosts.link(delay_ms=delay_ms, loss=loss)
            began = time.monotonic()
            seconds = self._a_token(4, 8 if delay_ms > 5 else 30, INTERFACE, f"{delay_ms:g} ms, loss {loss:g}")
            took, after = time.monotonic() - began, self.hosts.link()
            carried, dropped = after.carried - before.carried, after.dropped - before.dropped
            print(
                f"| {delay_ms:g} | {loss:.1%} | {carried:,} | {dropped} | {took:.1f} | {1e3 * seconds:.1f} |",
                flush=True,
            )

    def horizons(self) -> None:
        print(f"\n| one-way delay, ms | L | turn, ms (step {1e3 * STEP:g}) | turns waited in | a token, ms p50 |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        for delay_ms in DELAYS:
            for horizon in HORIZONS:
                found = take_turns(self.hosts, delay_ms, horizon, TURNS, STEP)
                if len(set(found.effects)) != 1:
                    self.wrong.append(f"turns at {delay_ms:g} ms, L = {horizon}")
                waited = max(found.waited[RANKS:])
                self.hosts.link(delay_ms=delay_ms)
                seconds = self._a_token(4, 60, FABRIC, f"fabric, {delay_ms:g} ms", "--horizon", str(horizon))
                times = f"{1e3 * found.seconds:.1f} | {waited:.0%} | {1e3 * seconds:.1f}"
                print(f"| {delay_ms:g} | {horizon} | {times} |", flush=True)

    def cuts(self) -> None:
        print("\n| T, s | cut for, s | packets lost | what came of it | host 0, host 1 ended after, s |")
        print("| ---: | ---: | ---: | --- | --- |")
        for limit, seconds in [*CUTS, *((limit, None) for limit in FOR_GOOD)]:
            with self.job(8, 100) as job:
                before = self.hosts.link().dropped
                job.start("--control-timeout-s", str(limit), pace="slow")
                job.wait_until_it_decodes()
                cut_at = time.monotonic()
                self.hosts.link(cut=True)
                if seconds is not None:
                    time.sleep(seconds)
                    self.hosts.link(cut=False)
                outcome = job.outcome()
                lost = self.hosts.link().dropped - before
                ended = ", ".join(f"{at - cut_at:.1f}" for at in outcome.ended_at)
                if seconds is None:
                    came = f"ended: host 0 names rank {_named(job, 0)}, host 1 rank {_named(job, RANKS)}"
                    late = max(outcome.ended_at) - cut_at > limit + 5
                    if late or outcome.left or 0 in outcome.codes or (_named(job, 0), _named(job, RANKS)) != (RANKS, 0):
                        self.wrong.append(f"a cut at T = {limit:g}")
                else:
                    came = "all answers, as of one rank" if outcome.codes == (0, 0) else "ended"
                    self.check(job, outcome, f"a cut of {seconds:g} s at T = {limit:g}")
            print(
                f"| {limit:g} | {'for good' if seconds is None else f'{seconds:g}'} | {lost} | {came} | {ended} |",
                flush=True,
            )

    def launchers(self) -> None:
        print("\n| torchrun killed on | its ranks gone after, s | the other host ended after, s | names rank |")
        print("| --- | ---: | ---: | ---: |")
        for host in HOSTS:
            with self.job(8, 100) as job:
                job.start("--control-timeout-s", "10", pace="slow")
                job.wait_until_it_decodes()
                killed, launcher = time.monotonic(), job.launchers()[host]
                ranks = [process for process in job.processes() if session_of(process) == launcher]
                os.kill(launcher, signal.SIGKILL)
                while any(session_of(rank) is not None for rank in ranks):
                    time.sleep(0.005)
                gone = time.monotonic() - killed
                outcome = job.outcome()
                other = outcome.ended_at[1 - host] - killed
                named = _named(job, (1 - host) * RANKS)
                if gone > LEFTOVERS or outcome.left or named not in range(host * RANKS, (host + 1) * RANKS):
                    self.wrong.append(f"torchrun killed on host {host}")
            print(f"| host {host} | {gone:.2f} | {other:.1f} | {named} |", flush=True)

    def _a_token(self, requests: int, tokens: int, interface: str, what: str, *options: str) -> float:
        """Seconds a token, the median of the requests of a job over the link as it is."""
        with self.job(requests, tokens) as job:
            summary = job.folder / "summary.json"
            job.start("--control-timeout-s", "120", "--summary", str(summary), *options, interface=interface)
            outcome = job.outcome()
            self.check(job, outcome, what)
            found: float = json.loads(summary.read_text())["tpot_ms"]["p50"] / 1e3 if summary.exists() else float("nan")
        return found


def _named(job: TwoNodeJob, rank: int) -> int | None:
    """Whom a rank's bundle blames."""
    for path in job.folder.glob(f"bundles/*/rank-{rank:05d}/verdict.json"):
        blamed: int = json.loads(path.read_text())["rank"]
        return blamed
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    tables = ("links", "horizons", "cuts", "launchers")
    parser = argparse.ArgumentParser(prog="python -m tests.network", description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(tables)} (default: all)")
    asked = parser.parse_args(arguments).tables or tables
    if unknown := set(asked) - set(tables):
        parser.error(f"{unknown.pop()!r} is none of {', '.join(tables)}")
    if reason := lacking():
        parser.error(reason)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with TwoHosts() as hosts, zygotes_on(hosts) as zygotes:
        bench = Bench(hosts, zygotes)
        for table in asked:
            getattr(bench, table)()
    print(f"\nload {os.getloadavg()[0]:.1f}; wrong: {bench.wrong or 'nothing'}")
    return int(bool(bench.wrong))


if __name__ == "__main__":
    sys.exit(main())
