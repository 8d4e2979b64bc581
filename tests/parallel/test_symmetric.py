"""Where symmetric memory cannot work, every rank gets the ordinary collectives and one of them says why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel.collectives import GroupCollectives
from parallel.symmetric import ROW_BYTES, ROWS, SymmetricCollectives, _log_fallback, _why_not, fastest_collectives

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


def test_only_rows_that_the_kernel_can_load_wide_take_it() -> None:
    collectives = object.__new__(SymmetricCollectives)
    collectives._limit = 2048
    full = torch.empty(2048, dtype=torch.bfloat16)
    assert collectives.takes(full[:1024].view(4, 256))
    assert collectives.takes(full[8:16])
    assert not collectives.takes(full[:1032]), "larger than the limit"
    assert not collectives.takes(full[:7]), "not a multiple of 16 bytes"
    assert not collectives.takes(full[:28].view(7, 4)), "rows are not"
    assert not collectives.takes(full[1:9]), "does not start at a multiple of 16 bytes"
    assert not collectives.takes(full.view(32, 64)[:, :8]), "not contiguous"
    assert not collectives.takes(full[:0])
    assert collectives.takes(torch.empty(512))
    assert not collectives.takes(torch.empty(516)), "larger, in bytes"
    assert not collectives.takes(torch.empty(8, dtype=torch.float16)), "a dtype that the kernel was not tried with"
    collectives._limit = 4 << 20
    assert collectives.takes(torch.empty(ROWS, 8))
    assert not collectives.takes(torch.empty(ROWS + 1, 8)), "more rows than there is memory for"
    assert collectives.takes(torch.empty(2, ROW_BYTES // 4))
    assert not collectives.takes(torch.empty(2, ROW_BYTES // 4 + 4)), "rows that are longer"
