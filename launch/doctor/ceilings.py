"""What the GPUs can reach at best: reading memory, multiplying matrices, copying to each other.

Knows: how each is timed with events, and what stands in where Triton is missing. Does not know: what a model needs of
it (roofline.py).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import torch

from launch.doctor.findings import Section

_BYTES = 1 << 30
_PEER_BYTES = 256 << 20
_SIDE = 8192
_REPEATS = 5
_READS = 16  # in a row between two events: one takes 0.25 ms on an H200, and a launch costs some per cent of that
_APART = 0.93  # of the best GPU: less is a finding


def ceilings(count: int) -> Section:
    """Of the first ``count`` GPUs, one after the other."""
    section = Section("Ceilings")
    rows: list[dict[str, Any]] = []
    for index in range(count):
        device = torch.device("cuda", index)
        row: dict[str, Any] = {"index": index}
        try:
            row["read_tb_per_s"] = round(_read_rate(section, device) / 1e12, 3)
            row["bf16_tflop_per_s"] = round(matmul_rate(device) / 1e12, 1)
        except torch.OutOfMemoryError:
            section.note(f"GPU {index} has too little free memory to be measured", "nvidia-smi shows who uses it")
        rows.append(row)
    section.facts["each"] = rows
    for name in ("read_tb_per_s", "bf16_tflop_per_s"):
        reached = {row["index"]: row[name] for row in rows if name in row}
        for index, rate in reached.items():
            if rate < _APART * max(reached.values()):
                section.warn(
                    f"GPU {index} reaches {rate} {name}, the best of them {max(reached.values())}",
                    f"nvidia-smi -q -i {index} -d PERFORMANCE,CLOCK,TEMPERATURE,ECC; every rank waits for this one",
                )
    if count > 1:
        section.facts["peer_gb_per_s"] = _peer_rates(section, count)
    return section


def read_rate(device: torch.device) -> float:
    """Bytes a second that a Triton kernel reads which does nothing else, from 1 GiB: many times what caches hold.

    ImportError where there is no Triton; what Triton raises where it cannot compile.
    """
    from models.kernels.bandwidth_probe import BLOCK, block_maxima

    with torch.cuda.device(device):
        values = torch.zeros(_BYTES // 4, dtype=torch.int32, device=device)
        maxima = torch.empty(values.numel() // BLOCK, dtype=torch.int32, device=device)
        return _BYTES / _seconds(lambda: block_maxima(values, maxima), launches=_READS)


def torch_read_rate(device: torch.device) -> float:
    """The same without Triton, a lower bound: bytes a second of the faster of torch's own two best ways.

    A sum over everything has about one load a thread in flight, of 16 bytes in float32 (8 in bfloat16); a copy has
    enough of them, but turns the memory from reading to writing and back. Which wins depends on the GPU.
    """
    with torch.cuda.device(device):
        values = torch.zeros(_BYTES // 4, dtype=torch.float32, device=device)
        summed = _BYTES / _seconds(lambda: torch.sum(values), launches=_READS)
        source, target = values.chunk(2)
        copied = _BYTES / _seconds(lambda: target.copy_(source), launches=_READS)  # half is read, half is written
        return max(summed, copied)


def _read_rate(section: Section, device: torch.device) -> float:
    try:
        return read_rate(device)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:  # Triton needs a C compiler, too
        reason = (str(error) or type(error).__name__).splitlines()[0]
        section.note(
            f"GPU {device.index} reads at least this fast: measured by torch, as Triton does not run here ({reason})",
            "pip install triton, and a C compiler (apt-get install gcc): the engine is slower without, too",
        )
        return torch_read_rate(device)


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations a second of a bfloat16 product of 8192 x 8192 matrices of random numbers."""
    with torch.cuda.device(device):
        a = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device=device)
        b = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(a)
        return 2 * _SIDE**3 / _seconds(lambda: torch.mm(a, b, out=out))


def copy_rate(source: int, target: int) -> float:
    """Bytes a second from one GPU's memory to another's."""
    with torch.cuda.device(source):
        here = torch.zeros(_PEER_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
        there = torch.empty(_PEER_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
        return _PEER_BYTES / _seconds(lambda: there.copy_(here, non_blocking=True))


def _peer_rates(section: Section, count: int) -> list[list[float | None]]:
    rates: list[list[float | None]] = [[None] * count for _ in range(count)]
    for a in range(count):
        for b in range(count):
            if a != b:
                rates[a][b] = round(copy_rate(a, b) / 1e9, 1)
    known = [rate for row in rates for rate in row if rate is not None]
    slow = [f"{a}->{b}" for a in range(count) for b in range(count) if (rates[a][b] or max(known)) < 0.5 * max(known)]
    if slow:
        section.warn(
            f"copies {', '.join(slow[:8])} run at less than half of the best pair's {max(known)} GB/s",
            "nvidia-smi nvlink -s shows links that are down; nvidia-smi topo -m the way they take",
        )
    return rates


def _seconds(work: Callable[[], object], launches: int = 1) -> float:
    """Of one ``work``: the median of a few runs of ``launches`` in a row, after one ``work`` that warms up."""
    event: Any = torch.cuda.Event  # untyped in some versions of torch
    work()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        for _ in range(launches):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / launches)
    return sorted(times)[len(times) // 2]
