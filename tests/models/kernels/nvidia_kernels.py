"""NVIDIA's kernels for tests: on a GPU, on the meta device, and on a CPU through Triton's interpreter. Needs Triton.

With tests/plant.py the only file of tests that names their classes; ``plant.kernels_with`` plants ops in them.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import torch

from models.kernels.attention import decode_work
from models.kernels.attention.prefill_choice import Prefill
from models.kernels.traits import H200, DeviceTraits
from models.ops.nvidia import InvariantNvidiaOps, NvidiaOps

CPU = torch.device("cpu")
Nvidia = NvidiaOps
InvariantNvidia = InvariantNvidiaOps


def nvidia_kernels(device: torch.device | str, **options: Any) -> Nvidia:
    """The fastest kernels. ``options``: which prefill attention, which table of choices ..."""
    return Nvidia(device, **options)


def invariant_nvidia_kernels(device: torch.device | str) -> InvariantNvidia:
    """Those of the deterministic mode."""
    return InvariantNvidia(device)


def nvidia_kernels_on_cpu(matmul: Any = None, *, traits: DeviceTraits = H200) -> Nvidia:
    """Without a GPU, FlashInfer and dependent launches. Products go to ``matmul``. Workspaces begin as NaN."""
    made = object.__new__(Nvidia)
    made.device, made.traits, made.pdl = CPU, traits, False
    made.matmul = Mock(slower={}) if matmul is None else matmul
    made.prefill = Prefill(CPU, "triton", traits)
    made.attention_sums = torch.full((1 << 20,), math.nan)
    made.attention_counters = torch.zeros(decode_work.COUNTERS, dtype=torch.int32)
    made.bind()
    return made


def invariant_nvidia_kernels_on_cpu(traits: DeviceTraits) -> InvariantNvidia:
    """Those of the deterministic mode without a GPU. Workspaces begin as NaN."""
    made = object.__new__(InvariantNvidia)
    made._place(CPU, traits)
    made.sums, made.attention_sums = (torch.full((1 << 20,), math.nan) for _ in range(2))
    made.bind()
    return made


def check_counters(kernels: Nvidia | InvariantNvidia) -> None:
    """What launches share and each sets back."""
    if isinstance(kernels, Nvidia):
        products, attention = kernels.matmul._counters, kernels.attention_counters
    else:
        products, attention = kernels.counters, kernels.attention_counters
    assert not products.any(), "a split product left its counters set"
    assert not attention.any(), "a split attention left its counters set"
