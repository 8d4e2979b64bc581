"""What the kernels' launch shapes depend on: a GPU's multiprocessors, caches, memory rate and compute capability.

Knows: how these are read from a device, their values on an H200, and when two GPUs may share a table of choices. Does
not know: which launch shape they lead to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FLOAT8_CAPABILITY = (8, 9)  # the first that converts codes of float8_e4m3fn, and multiplies them
_FEWEST_STAGES, _FEWEST_COLUMNS = 3, 32


def fitting_steps(columns: int, stages: int, *, rows: int, element_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """(columns of a step, pipeline stages) of a product whose two tiles have ``rows`` rows together: those given, or
    fewer if they would not fit ``shared_bytes``. Stages go first, down to 3, then columns, by halves down to 32.

    Neither changes the order of a sum: one accumulator takes the columns in ascending order.
    """

    def fits() -> bool:
        return (stages - 1) * rows * columns * element_bytes <= shared_bytes  # the last stage's step is in registers

    while not fits() and stages > _FEWEST_STAGES:
        stages -= 1
    while not fits() and columns > _FEWEST_COLUMNS:
        columns //= 2
    return columns, stages


TALL_ROWS = 64  # the fewest that a tensor core's tall operand has (wgmma)
_SAME_CLASS = 0.1  # of the memory rate: an H100's lies 30% below an H200's, variants of one model 3% apart


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """One GPU. ``shared_bytes``: the most shared memory that one program may ask for. ``memory_rate``: bytes/s of the
    memory's clock and width (the data sheet's figure), 0 if the driver does not say. ``name``: the driver's.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int = 60 << 20
    memory_rate: float = 0.0
    name: str = ""

    @property
    def dependent_launch(self) -> bool:
        """Programmatic dependent launch and TMA: sm_90 and later."""
        return self.capability[0] >= 9

    @property
    def hopper(self) -> bool:
        """sm_90 itself: later GPUs have other tensor cores, and some have less shared memory."""
        return self.capability[0] == 9

    def like(self, other: DeviceTraits) -> bool:
        """Whether what was fastest on one may be taken to be fastest on the other: multiprocessors of one kind and
        number, and memory as fast but for 10%. An unknown memory rate is like no other.
        """
        alike = self.capability == other.capability and self.multiprocessors == other.multiprocessors
        return alike and abs(self.memory_rate - other.memory_rate) < _SAME_CLASS * self.memory_rate


H200 = DeviceTraits(
    capability=(9, 0),
    multiprocessors=132,
    shared_bytes=227 << 10,
    l2_bytes=60 << 20,
    memory_rate=4.8e12,
    name="NVIDIA H200",
)
# KiB of shared memory that one program may have (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"); a GPU that is not listed gets the least of them.
_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}


def traits_of(device: torch.device) -> DeviceTraits:
    """The traits of a CUDA device. ``device`` must exist: torch asks its driver."""
    properties: Any = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    kib = _SHARED_KIB.get(capability, min(_SHARED_KIB.values()))
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return DeviceTraits(
        capability,
        properties.multi_processor_count,
        kib << 10,
        getattr(properties, "L2_cache_size", 0) or H200.l2_bytes,
        2e3 * kilohertz * bits / 8,  # two transfers a clock
        torch.cuda.get_device_name(device),
    )
