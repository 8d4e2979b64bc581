"""What the kernels' launch shapes depend on: a GPU's multiprocessors, shared memory and compute capability.

Knows: how these are read from a device, and their values on an H200. Does not know: which launch shape they lead to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """One GPU. ``shared_bytes``: the most shared memory that one program may ask for."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @property
    def dependent_launch(self) -> bool:
        """Programmatic dependent launch and TMA: sm_90 and later."""
        return self.capability[0] >= 9

    @property
    def hopper(self) -> bool:
        """sm_90 itself: later GPUs have other tensor cores, and some have less shared memory."""
        return self.capability[0] == 9


H200 = DeviceTraits(capability=(9, 0), multiprocessors=132, shared_bytes=227 << 10)  # an H100 SXM is the same
# KiB of shared memory that one program may have (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"); a GPU that is not listed gets the least of them.
_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}


def traits_of(device: torch.device) -> DeviceTraits:
    """The traits of a CUDA device. ``device`` must exist: torch asks its driver."""
    properties: Any = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    kib = _SHARED_KIB.get(capability, min(_SHARED_KIB.values()))
    return DeviceTraits(capability, properties.multi_processor_count, kib << 10)
