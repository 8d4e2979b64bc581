"""Which kernels are chosen where, and what the user is told."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from models.ops.select import select_kernels


def test_reference_on_a_cpu_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    kernels = select_kernels("cpu", torch.float32, 64)
    assert (kernels.name, kernels.slower) == ("reference", None)
    assert not caplog.records


def test_missing_gpu_packages_are_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "models.ops.nvidia", None)  # import then fails, as it does without triton
    with caplog.at_level(logging.WARNING):
        kernels = select_kernels("cuda:0", torch.bfloat16, 128)
    assert kernels.name == "reference"
    assert kernels.slower is not None, "which is counted"
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "plain torch" in message
    assert "pip install 'lockstride[cuda]'" in message


@pytest.mark.gpu
def test_hopper_kernels_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_kernels("cuda:0", torch.bfloat16, 128).name == "hopper"
        assert not caplog.records
        kernels = select_kernels("cuda:0", torch.bfloat16, 80)
        kernels.agree_on_kernels(int)
    assert (kernels.name, kernels.prefill_name) == ("hopper", "triton")
    assert len(caplog.records) == 1
    assert "head_dim 80" in caplog.records[0].getMessage()
