"""NVIDIA's kernels for tests: on a GPU, on the meta device, and on a CPU through Triton's interpreter. Needs Triton.

With tests/plant.py the only file of tests that names their classes; ``plant.kernels_with`` plants ops in them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from models.kernels.attention import decode_work
from models.kernels.attention.prefill_choice import Prefill
from models.kernels.deterministic import DeterministicKernels
from models.kernels.nvidia import NvidiaKernels
from models.kernels.traits import H200, DeviceTraits
from tests.plant import reference_kernels

CPU = torch.device("cpu")
Nvidia = NvidiaKernels
InvariantNvidia = DeterministicKernels


def nvidia_kernels(device: torch.device | str, **options: Any) -> Nvidia:
    """The fastest kernels. ``options``: which prefill attention, which table of choices ..."""
    return Nvidia(device, **options)


def invariant_nvidia_kernels(device: torch.device | str) -> InvariantNvidia:
    """Those of the deterministic mode."""
    return InvariantNvidia(device)


def nvidia_kernels_on_cpu(matmul: Any = None, *, traits: DeviceTraits = H200) -> Nvidia:
    """Without a GPU, FlashInfer and dependent launches. Products go to ``matmul``. Workspaces begin as NaN."""
    made = object.__new__(Nvidia)
    made.device, made.traits, made.pdl, made.balanced = CPU, traits, False, True
    made.matmul = matmul
    vars(made)["_reference"] = reference_kernels()
    made._prefill = Prefill(CPU, "triton", traits)
    made._attention_partial = torch.full((1 << 20,), math.nan)
    made._attention_counters = torch.zeros(decode_work.COUNTERS, dtype=torch.int32)
    made._in_torch = {}
    return made


def invariant_nvidia_kernels_on_cpu(traits: DeviceTraits) -> InvariantNvidia:
    """Those of the deterministic mode without a GPU. Workspaces begin as NaN."""
    made = object.__new__(InvariantNvidia)
    made._open(CPU, traits)
    made._sums, made._chunks = (torch.full((1 << 20,), math.nan) for _ in range(2))
    return made


def check_counters(kernels: Nvidia | InvariantNvidia) -> None:
    """What launches share and each sets back."""
    if isinstance(kernels, Nvidia):
        products, attention = kernels.matmul._counters, kernels._attention_counters
    else:
        products, attention = kernels._counters, kernels._chunk_counters
    assert not products.any(), "a split product left its counters set"
    assert not attention.any(), "a split attention left its counters set"
