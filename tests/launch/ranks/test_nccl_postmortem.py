"""The flight recorder in a rank's bundle: from a real group, in a process of its own, since its buffer is made once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch.ranks.process_group import RECORDED_CALLS, TRACE, abort_groups, record_collectives, write_flight_recorder

_RANK = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from launch.ranks.process_group import abort_groups, record_collectives, write_flight_recorder
record_collectives()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for rows in (3, 5):
    dist.all_reduce(torch.ones(rows))
write_flight_recorder(Path(sys.argv[1]))
assert abort_groups(), "there is no NCCL to abort"
dist.destroy_process_group()  # gloo's threads must not outlive their group: the process would end by abort()
"""


def test_nothing_to_tell_without_a_group(tmp_path: Path) -> None:
    write_flight_recorder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert abort_groups()


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_buffer_is_asked_for_unless_somebody_did(name: str) -> None:
    environ: dict[str, str] = {}
    record_collectives(environ)
    assert environ == {"TORCH_FR_BUFFER_SIZE": str(RECORDED_CALLS)}
    environ = {name: "7"}
    record_collectives(environ)
    assert environ == {name: "7"}


@pytest.mark.parametrize(("backends", "recorder"), [("cpu:gloo,cuda:nccl", "nccl"), ("cpu:gloo", "fr")])
def test_the_recorder_is_that_of_the_group(
    backends: str, recorder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch built with CUDA has both."""
    for name in ("nccl", "fr"):
        dump = f"_dump_{name}_trace_json"
        monkeypatch.setattr(torch._C._distributed_c10d, dump, lambda name=name: name.encode(), raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    write_flight_recorder(tmp_path)
    assert (tmp_path / TRACE).read_text() == recorder


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="torch 2.12 records NCCL only"
)
def test_the_calls_of_a_group_are_written(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        [sys.executable, "-c", _RANK, str(tmp_path)], capture_output=True, text=True, timeout=600, cwd=root
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    trace = json.loads((tmp_path / TRACE).read_text())
    assert [call["input_sizes"] for call in trace["entries"]] == [[[3]], [[5]]]
    assert {call["profiling_name"] for call in trace["entries"]} == {"gloo:all_reduce"}
