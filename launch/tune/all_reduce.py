"""Up to which size each all-reduce kernel is the fastest, between the ranks that were started.

Knows: how each is timed, with the residual add and the norm that follow it in a decoder, and how limits come from
times. Does not know: what start-ups do with limits (launch/ranks/start_engine.py), or how a kernel works
(parallel/comm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from models.kernels.matmul import norm as norm_kernels
from models.kernels.matmul.autotune import median_graph_us
from parallel.comm.collectives import GroupCollectives
from parallel.comm.symmetric_all_reduce import (
    ROW_BYTES,
    AllReduceKernel,
    SizeLimits,
    SymmetricCollectives,
    fastest_collectives,
)
from parallel.comm.symmetric_memory import has_dependent_launches

_CALLS = 32  # of a graph
_MOST_ROWS = 8192  # of a step's tokens, by default
_NOISE = 1.02  # times the fastest: as fast
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of an all-reduce of ``size`` bytes with the norm after it."""

    size: int
    one_shot: float
    two_shot: float
    nccl: float


def limits_from(times: Sequence[Times]) -> SizeLimits:
    """The largest size up to which one-shot was never slower than the others, then the same of two-shot against NCCL.

    ``times``: ascending by size. Whatever is faster again at a larger size is not taken: limits are two numbers.
    """
    one_shot = two_shot = 0
    for one in times:
        if one.one_shot > _NOISE * min(one.two_shot, one.nccl):
            break
        one_shot = one.size
    for one in times:
        if one.size > one_shot:
            if one.two_shot > _NOISE * one.nccl:
                break
            two_shot = one.size
    return SizeLimits(one_shot, two_shot)


def widened(found: SizeLimits, times: Sequence[Times], before: SizeLimits) -> SizeLimits:
    """``found``, but where our kernels won at every size of ``times`` no smaller than ``before``: a narrow model has no
    larger sums, and another one, with the same limits, may.
    """
    if not times or times[-1].size > max(found.one_shot, found.two_shot):
        return found
    if found.two_shot:
        return SizeLimits(found.one_shot, max(found.two_shot, before.one_shot, before.two_shot))
    return SizeLimits(max(found.one_shot, before.one_shot), before.two_shot)


def measure(
    group: dist.ProcessGroup, device: torch.device, width: int, dtype: torch.dtype
) -> tuple[list[Times], str | None]:
    """Of 1 to 8192 rows of ``width``; every rank of ``group`` calls this. Where these kernels cannot run there are no
    times, but a reason.
    """
    made = fastest_collectives(group, device)
    if not isinstance(made, SymmetricCollectives):
        return [], made.slower or "there is no symmetric memory between these GPUs"
    if width * dtype.itemsize > ROW_BYTES:
        return [], f"a row of {width} {dtype} is more than the {ROW_BYTES} bytes that the kernels take"
    nccl, norm, pdl = (
        GroupCollectives(group),
        torch.ones(width, dtype=dtype, device=device),
        has_dependent_launches(device),
    )
    times = []
    rows = 1
    while rows <= _MOST_ROWS:
        x = torch.randn(rows, width, dtype=dtype, device=device)
        ways = (partial(_fused, made.dispatch.one_shot, norm), partial(_fused, made.dispatch.two_shot, norm))
        found = []
        for way in (*ways, partial(_apart, nccl, norm, torch.zeros_like(x), pdl)):
            dist.barrier(group)
            found.append(median_graph_us(_chain(way, x), device) / _CALLS)
        times.append(Times(rows * width * dtype.itemsize, *found))
        rows *= 2
    return times, None


def _fused(kernel: AllReduceKernel, norm: Tensor, x: Tensor) -> Tensor:
    return kernel(x, residual_TN=x, norm_N=norm, eps=_EPS)[0]


def _apart(nccl: GroupCollectives, norm: Tensor, residual: Tensor, pdl: bool, x: Tensor) -> Tensor:
    return norm_kernels.rms_norm(nccl.all_reduce(x), residual, norm, _EPS, pdl)


def _chain(way: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """Calls that follow each other, as in a step."""

    def run() -> None:
        y = x
        for _ in range(_CALLS):
            y = way(y)

    return run


def table(times: Sequence[Times], ranks: int, before: SizeLimits | None, after: SizeLimits) -> str:
    """For a reader: every size, and which limits follow."""
    lines = [f"all-reduce between {ranks} ranks, with the norm, us:", "| KiB | one-shot | two-shot | NCCL |"]
    lines += ["| ---: | ---: | ---: | ---: |"]
    lines += [f"| {one.size / 1024:g} | {one.one_shot:.1f} | {one.two_shot:.1f} | {one.nccl:.1f} |" for one in times]
    return "\n".join([*lines, f"limits before: {_told(before)}; after: {_told(after)}"])


def _told(limits: SizeLimits | None) -> str:
    if limits is None:
        return "NCCL for all"
    return f"one-shot up to {limits.one_shot >> 10} KiB, two-shot up to {limits.two_shot >> 10} KiB"
