"""Dispatch and combine in one kernel each over symmetric memory; NCCL does what is too large.

Knows: which exchanges are small enough. Does not know: where symmetric memory works (symmetric_memory.py), the kernels
(ep_exchange_triton.py, all_reduce_triton.py). Shape letters as in ep_exchange.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.call_log import CallLog
from parallel.comm.ep_exchange import GroupExchange
from parallel.comm.peer_buffers import PeerBuffers, peer_buffer_bytes
from parallel.comm.symmetric_memory import SentinelMemory, build_on_every_rank, has_dependent_launches


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """``rows`` of the peer buffers, all in one launch; ``bytes`` that a rank sends to all its peers at most, in as many
    launches as that takes."""

    rows: int
    bytes: int


# NCCL was slower at every size that was measured, between two groups and between four (docs/lab/measurements/
# dp-attention.md): up to 34 MB to each other rank, where a combine takes 75 and 94% of its time and a dispatch 37 and
# 47%. Between more groups none was, so they keep to what was measured first. Shorter launches of a long prompt would
# cost their latency more often.
_MOST_MEASURED_GROUPS = 4
_LAUNCH_ROWS = 2048
_BYTES_TO_EACH = 64 << 20
_OF_MORE = ExchangeLimits(512, 512 * 4160)
ROW_BYTES = 16 << 10
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # dtypes the kernels were tested with
_VECTOR = 16  # bytes of the widest loads and stores
_LOST = "exchanges between groups go through NCCL or gloo, in several launches each"


class SymmetricExchange(GroupExchange):
    """GroupExchange whose exchanges run in our own kernels where that is faster (``runs_in_kernels``).

    Gathered values are the same but for the sign of zeros. Sums are taken in float32 in group order and rounded once.
    The choice depends only on what all ranks have in common: padded rows, width and dtype. ``limits``: up to which
    sizes our kernels are taken, the same on every rank; None takes what was measured. The constructor is a collective
    call of ``group``. Raises RuntimeError where symmetric memory does not work, ImportError without Triton.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        calls: CallLog | None = None,
        limits: ExchangeLimits | None = None,
    ) -> None:
        from parallel.comm.all_reduce_triton import all_reduce_rows
        from parallel.comm.ep_exchange_triton import dispatch_rows

        super().__init__(group, calls)
        self.limits = limits_of(self.groups) if limits is None else limits
        rows = self.limits.rows
        self._memory = SentinelMemory(group, device, peer_buffer_bytes(self.groups, rows, ROW_BYTES))
        use_counts = torch.zeros(rows, dtype=torch.int32, device=device)
        buffers = PeerBuffers(self._memory.addresses, use_counts, self.index, rows, ROW_BYTES)
        pdl = has_dependent_launches(device)
        self._dispatch_rows = partial(dispatch_rows, buffers=buffers, pdl=pdl)
        self._reduce_scatter_rows = partial(all_reduce_rows, buffers=buffers, scatter=True, pdl=pdl)

    def dispatch(
        self, hidden_TN: Tensor, weights_TC: Tensor, ids_TC: Tensor, rows: int, local_E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        width, choices = hidden_TN.shape[1], ids_TC.shape[1]
        if not runs_in_kernels(self.limits, self.groups, rows, width, choices, hidden_TN.dtype):
            return super().dispatch(hidden_TN, weights_TC, ids_TC, rows, local_E)
        with self.calls.call("all_gather", hidden_TN, rows):
            parts = (hidden_TN.contiguous(), weights_TC.contiguous(), ids_TC.contiguous())
            return self._dispatch_rows(*parts, rows, local_E)

    def reduce_scatter(self, x_YN: Tensor) -> Tensor:
        rows, width = x_YN.shape[0] // self.groups, x_YN.shape[1]
        if not runs_in_kernels(self.limits, self.groups, rows, width, 0, x_YN.dtype):
            return super().reduce_scatter(x_YN)
        with self.calls.call("reduce_scatter", x_YN):
            return self._reduce_scatter_rows(x_YN.contiguous())[0]


def limits_of(groups: int) -> ExchangeLimits:
    """Between up to four groups even the exchanges of long prompts run in our kernels."""
    if groups > _MOST_MEASURED_GROUPS:
        return _OF_MORE
    return ExchangeLimits(_LAUNCH_ROWS, max(1, groups - 1) * _BYTES_TO_EACH)


def runs_in_kernels(
    limits: ExchangeLimits, groups: int, rows: int, width: int, choices: int, dtype: torch.dtype
) -> bool:
    """Whether our kernels take an exchange of ``rows`` a group, each with ``choices`` weights and expert ids."""
    hidden_bytes = width * dtype.itemsize
    row_bytes = hidden_bytes + 8 * choices
    if dtype not in DTYPES or hidden_bytes % _VECTOR or not 0 < row_bytes <= ROW_BYTES or rows < 1:
        return False
    return max(1, groups - 1) * rows * row_bytes <= limits.bytes


def fastest_exchange(group: dist.ProcessGroup, device: torch.device, calls: CallLog | None = None) -> GroupExchange:
    """SymmetricExchange where every rank can have one, GroupExchange otherwise, the same on all ranks.

    A collective call of ``group``, before any graph is captured. A fallback is logged once, with its reason.
    """
    make = partial(SymmetricExchange, group, device, calls)
    made = build_on_every_rank(group, device, make, partial(_self_test, device=device), _LOST)
    return GroupExchange(group, calls, slower=_LOST) if made is None else made


def _self_test(made: SymmetricExchange, device: torch.device) -> bool:
    """Dispatch and combine with every dtype: each group brings one row, with one expert and one -1, padded to two."""
    ids_TC = torch.tensor([[made.index, -1]], dtype=torch.int32, device=device)
    weights_TC = (ids_TC + 1).float()
    local_E = torch.arange(3, 3 + made.groups, dtype=torch.int32, device=device)
    groups = range(made.groups)
    numbers = [row for group in groups for row in ([group + 3, -1], [-1, -1])]
    weights = [row for group in groups for row in ([group + 1, 0], [0, 0])]
    hidden = [row for group in groups for row in ([group + 1] * 8, [0] * 8)]
    total = [[made.groups * (made.index + 1)] * 8, [0] * 8]
    found = []
    for dtype in DTYPES:
        hidden_TN = torch.full((1, 8), made.index + 1, dtype=dtype, device=device)
        gathered = made.dispatch(hidden_TN, weights_TC, ids_TC, 2, local_E)
        found.append([part.tolist() for part in (*gathered, made.reduce_scatter(gathered[0]))])
    return found == [[hidden, weights, numbers, total]] * len(DTYPES)
