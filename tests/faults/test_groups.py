"""Faults where groups share experts: a rank of another group than rank 0's is named as any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.cases import Case, Fault, Phase
from tests.faults.job import Job, write_files
from tests.runtime.engine.rig import TINY
from tests.runtime.engine.test_experts import EXPERTS
from tests.torchrun import zygote


class GroupsJob(Job):
    """Two groups of two ranks over a sparse model."""

    def program(self) -> list[str]:
        (self.folder / "model" / "config.json").write_text(json.dumps(TINY | EXPERTS))
        return [*super().program(), "--data-parallel-size", "2"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "case",
    [Case(Fault.KILL, Phase.DECODE, 3), pytest.param(Case(Fault.STALL, Phase.DECODE, 2), marks=pytest.mark.long)],
    ids=str,
)
def test_a_rank_of_another_group_is_named(case: Case, tmp_path: Path) -> None:
    write_files(tmp_path)
    with GroupsJob(tmp_path, str(case)) as job:
        outcome = job.outcome(job.torchrun(zygote()))
    assert outcome.code not in (0, None), outcome.said[-3000:]
    assert outcome.culprit == case.rank, outcome.said[-3000:]
    assert set(case.survivors) <= outcome.verdicts.keys()
    assert outcome.left == outcome.sockets == ()
