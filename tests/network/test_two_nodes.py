"""`generate` on two hosts with two ranks each, over a link that is slow, loses packets or breaks.

The answers are those of one rank, whatever the link does, or both hosts' ranks end by name. Launchers and ranks are
forks of processes that have imported everything, one on each host.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from parallel.control.errors import Cause
from tests.faults.job import ROOT
from tests.faults.zygote import Zygote
from tests.launch.generate.batches import answers_of
from tests.network.hosts import HOSTS, TwoHosts
from tests.network.jobs import RANKS, TwoNodeJob, answers_alone, write_files
from tests.network.sockets import listening

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PATIENT = ("--control-timeout-s", "60")  # more than any of these links, and a busy machine, ever needs
LIMIT = 6.0  # --control-timeout-s where a job is to end; beats of a busy host come late
PROMISED = LIMIT + 5.0
SLACK = 3.0  # times count so many-fold: other tests run beside these
LOOPBACK = {"127.0.0.1", "::1"}
TORCHRUN = {"0.0.0.0", "::"}  # its agent's store, which we do not open


@pytest.fixture
def job(hosts: TwoHosts, zygotes: list[Zygote], tmp_path: Path) -> TwoNodeJob:
    return TwoNodeJob(hosts, zygotes, tmp_path)


def prepared(job: TwoNodeJob, requests: int, tokens: int) -> dict[str, Any]:
    """Files for a job, and the right answers."""
    write_files(job.folder, requests, tokens)
    return answers_alone(job.folder)


def wait_for_losses(hosts: TwoHosts, packets: int) -> None:
    """Until the link has lost so many more."""
    before = hosts.link().dropped
    until = time.monotonic() + 60
    while hosts.link().dropped < before + packets:
        assert time.monotonic() < until, "nothing came to the link"
        time.sleep(0.05)


def test_a_slow_link_changes_no_token(hosts: TwoHosts, job: TwoNodeJob) -> None:
    expected = prepared(job, 4, 8)
    with job:
        hosts.link(delay_ms=5)
        job.start(*PATIENT)
        job.check_completed(expected)


def test_a_hybrid_and_its_guesses(job: TwoNodeJob) -> None:
    """The state of gated delta nets over four ranks, windows of the MTP layer in the checkpoint: one rank's answers
    without."""
    write_files(job.folder, 4, 24, model=ROOT / "models" / "demo" / "hybrid")
    expected = answers_alone(job.folder)
    guesses = {"method": "mtp", "num_speculative_tokens": 2, "disable_by_batch_size": 8}
    with job:
        job.start(*PATIENT, "--speculative-config", json.dumps(guesses))
        outcome = job.outcome()
    assert (outcome.codes, outcome.left) == ((0, 0), ()), "\n".join(outcome.said)
    found = answers_of(job.folder / "out.jsonl")
    assert sum(row.pop("speculation")["accepted_tokens"] for row in found.values()) > 0
    assert found == expected


def test_a_link_that_becomes_slow_changes_no_token(hosts: TwoHosts, job: TwoNodeJob) -> None:
    """A step over it takes seconds: only the last ones do. Loading over it is part of `make test-all PART=network`."""
    expected = prepared(job, 2, 16)
    with job:
        job.start(*PATIENT, pace="slow")
        job.wait_until_it_decodes()
        hosts.link(delay_ms=50)
        job.check_completed(expected)


def test_a_link_that_loses_packets_changes_no_token(hosts: TwoHosts, job: TwoNodeJob) -> None:
    expected = prepared(job, 4, 30)
    before = hosts.link(loss=0.01)
    with job:
        job.start(*PATIENT)
        job.check_completed(expected)
    after = hosts.link()
    assert after.dropped > before.dropped
    assert after.dropped - before.dropped < 0.1 * (after.carried - before.carried)


def test_a_short_cut_is_survived_and_nothing_listens_where_it_should_not(hosts: TwoHosts, job: TwoNodeJob) -> None:
    expected = prepared(job, 8, 100)
    with job:
        job.start(*PATIENT, pace="slow")
        job.wait_until_it_decodes()
        for host, launcher in zip(HOSTS, job.launchers(), strict=True):
            found = listening(launcher)
            beyond = {address for address, _ in found} - LOOPBACK - {hosts.address(host)}
            stores = {port for address, port in found if address in TORCHRUN}
            assert beyond <= TORCHRUN, found
            assert stores <= {job.port}, found
        hosts.link(cut=True)
        wait_for_losses(hosts, 10)
        assert job.running
        hosts.link(cut=False)
        job.check_completed(expected)


def test_a_cut_link_ends_both_hosts_ranks_by_name(hosts: TwoHosts, job: TwoNodeJob) -> None:
    write_files(job.folder, 8, 100)
    with job:
        job.start("--control-timeout-s", str(LIMIT), pace="slow")
        job.wait_until_it_decodes()
        hosts.link(cut=True)
        cut = time.monotonic()
        outcome = job.outcome()
    said = "\n".join(outcome.said)
    assert all(code not in (0, None) for code in outcome.codes), said
    assert outcome.left == ()
    assert max(outcome.ended_at) - cut < LIMIT + SLACK * (PROMISED - LIMIT), said
    assert "does not leave" not in said
    for rank in range(RANKS * len(HOSTS)):
        host = rank // RANKS
        blamed = (1 - host) * RANKS  # the first rank of the other host, over whom alone it hears of that host
        assert f"rank {rank} ends the job: rank {blamed} " in outcome.said[host], said
        verdict = json.loads(next(job.folder.glob(f"bundles/*/rank-{rank:05d}/verdict.json")).read_text())
        assert verdict["rank"] == blamed
        if verdict["cause"] == Cause.NO_PROGRESS:
            assert "the network to its node is cut, or it is stopped" in verdict["text"]
        else:  # a first rank that waited for a record, and not for a collective, when the link was cut
            assert verdict["cause"] == Cause.DEADLINE
    summary = json.loads(next(job.folder.glob("bundles/*/summary.json")).read_text())
    assert summary["culprit"] == RANKS
