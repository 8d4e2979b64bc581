"""Real faults in real jobs of four ranks under torchrun: each ends by name and in time, and leaves what it promised.

One case of each fault by a seed (LOCKSTRIDE_FAULT_SEED; 10, where the rank whose disk is full has something to write);
`make test-all PART=faults` runs them all. Here torchrun and its ranks are forks of a process that has imported
everything, and share two cores with other tests: times count SLACK-fold.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from parallel.control.errors import Cause
from tests.faults.cases import ALL, WORLD, Case, Fault, Phase, dozen
from tests.faults.job import LEFTOVERS, job, run
from tests.faults.orphans import seconds_to_end
from tests.faults.promises import UNNAMED, Reference, broken
from tests.torchrun import zygote

SEED = int(os.environ.get("LOCKSTRIDE_FAULT_SEED", "10"))
SLACK = 3.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.make(tmp_path_factory.mktemp("reference"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", dozen(SEED), ids=str)
def test_a_fault_ends_the_job_as_promised(case: Case, tmp_path: Path, reference: Reference) -> None:
    outcome = run(tmp_path, str(case), zygote())
    assert broken(case, outcome, tmp_path, reference, SLACK) == [], outcome.said[-6000:]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("launcher", "phase"), [("torchrun", "load"), ("torchrun", "decode"), ("daemon", "decode")])
def test_no_rank_outlives_its_launcher(launcher: str, phase: str, tmp_path: Path) -> None:
    """The daemon stands for Slurm's: it sets the variables of srun, and nothing is between it and the ranks."""
    forks = zygote() if launcher == "torchrun" else None
    assert seconds_to_end(tmp_path, launcher, phase, LEFTOVERS, forks) is not None


@pytest.mark.multiprocess
def test_a_job_that_is_told_to_end_while_it_loads_does_so_at_once(tmp_path: Path) -> None:
    """Slurm's or a person's SIGTERM goes to torchrun, which passes it on."""
    with job(tmp_path, str(Case(Fault.STALL, Phase.LOAD, 2))) as made:
        agent = made.torchrun(zygote())
        made.wait_for_fault(agent)
        os.kill(agent.pid, signal.SIGTERM)
        outcome = made.outcome(agent)
    assert outcome.code != 0
    assert outcome.left == outcome.sockets == ()
    assert outcome.summary is not None
    assert outcome.summary["cause"] == Cause.TERMINATED, outcome.said[-3000:]


def test_a_seed_has_every_fault_and_nearly_every_place_and_twelve_have_all_cases() -> None:
    for seed in range(12):
        assert [case.fault for case in dozen(seed)] == [*Fault]
        assert len({(case.phase, case.rank) for case in dozen(seed)}) >= len(Phase) * WORLD - 1
    assert set(ALL) == {case for seed in range(20, 32) for case in dozen(seed)}
    assert len(ALL) == (len(Fault) * len(Phase) - 1) * WORLD


def test_nearly_every_culprit_must_be_named() -> None:
    ending = [case for case in ALL if case.ends_job]
    assert set(UNNAMED) <= set(ending)
    assert len(UNNAMED) <= 0.05 * len(ending)
