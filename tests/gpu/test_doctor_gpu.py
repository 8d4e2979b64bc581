"""`doctor` on a machine with GPUs: devices, ceilings and kernels are found, and links where there are several GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.doctor import command as doctor
from launch.doctor.findings import Level, Section, worst


@pytest.fixture
def sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Section]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return {section.title: section for section in doctor.look({})}


@pytest.mark.gpu
def test_what_a_gpu_offers(sections: dict[str, Section]) -> None:
    assert worst([sections["GPUs"], sections["Kernels"], sections["Ceilings"]]) is not Level.ERROR
    devices = sections["GPUs"].facts["devices"]
    assert [row["index"] for row in devices] == list(range(torch.cuda.device_count()))
    assert all(0 < row["free_gib"] <= row["total_gib"] for row in devices)
    assert sections["Kernels"].facts["chosen"][0]["kernels"] == "hopper"
    for row in sections["Ceilings"].facts["each"]:
        assert row["read_tb_per_s"] > 0.1
        assert row["bf16_tflop_per_s"] > 10


@pytest.mark.gpu
def test_what_is_timed_reads_everything() -> None:
    """More than 2 GiB, so that offsets in bytes do not fit 32 bits; the largest value lies elsewhere in each block."""
    from models.kernels.bandwidth_probe import BLOCK, block_maxima  # needs Triton

    blocks = (2 << 30) // (4 * BLOCK) + 3
    values = torch.zeros(blocks, BLOCK, dtype=torch.int32, device="cuda")
    expected = torch.arange(1, blocks + 1, dtype=torch.int32, device="cuda")
    values[torch.arange(blocks, device="cuda"), torch.arange(blocks, device="cuda") * 37 % BLOCK] = expected
    assert torch.equal(block_maxima(values.flatten()), expected)


@pytest.mark.multigpu
def test_how_gpus_are_linked(sections: dict[str, Section]) -> None:
    count = torch.cuda.device_count()
    links = sections["Links between GPUs"].facts
    assert len(links["peer_access"]) == len(links["links"]) - 1 == count
    rates = sections["Ceilings"].facts["peer_gb_per_s"]
    assert all((rates[a][b] is None) == (a == b) for a in range(count) for b in range(count))
