"""Where symmetric memory cannot work, every rank gets the ordinary collectives and one of them says why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel.collectives import GroupCollectives
from parallel.symmetric import _log_fallback, _why_not, fastest_collectives

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_without_gpus_the_ordinary_collectives_are_chosen(group: dist.ProcessGroup) -> None:
    chosen = fastest_collectives(group, CPU)
    assert type(chosen) is GroupCollectives
    assert torch.equal(chosen.all_reduce(torch.arange(8.0)), torch.arange(8.0))
    assert _why_not(group, CPU) == "the ranks compute on cpu"


def test_the_reason_is_logged_for_a_group_of_several(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        _log_fallback(group, "no peers")
        assert not caplog.records, "a rank alone has nothing to lose"
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        _log_fallback(group, "no peers")
    assert [record.getMessage().endswith(": no peers") for record in caplog.records] == [True]
