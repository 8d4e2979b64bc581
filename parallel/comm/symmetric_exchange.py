"""Expert-parallel exchange between DP groups: dispatch (all-gather of tokens) and combine (reduce-scatter of sums), by
NCCL or, where they are small, in one kernel each over symmetric memory.

Knows: all-gather and reduce-scatter of rows between the ranks that have the same position in their groups, and what a
dispatched row holds. All shapes are fixed, so both can be captured. Does not know: which experts a rank holds, routing,
how groups agree on the number of rows (runtime/groups/step_sync.py), the kernels (ep_exchange_triton.py,
all_reduce_triton.py), where symmetric memory works.
Shape letters: R groups, X rows of each group after padding, Y = R * X, T rows of this group, N hidden size, C experts
chosen by a token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.call_log import CallLog
from parallel.comm.peer_buffers import PeerBuffers, peer_buffer_bytes
from parallel.comm.symmetric_memory import SentinelMemory, build_on_every_rank, has_dependent_launches

# torch 2.13 renamed both and warns about the old names, which are the only ones in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TokenExchange(Protocol):
    """An exchange between ``groups`` groups; this is group ``index``. All make the same calls with the same shapes."""

    index: int
    groups: int
    slower: str | None = None  # why exchanges are slower than the usual ones; None where they are not

    def all_gather(self, x_XN: Tensor) -> Tensor:
        """Concatenates every group's rows, group 0 first: [X, N] -> [R * X, N], any dtype."""
        ...

    def reduce_scatter(self, x_YN: Tensor) -> Tensor:
        """Sums over groups and keeps this group's rows: [R * X, N] -> [X, N]."""
        ...

    def dispatch(
        self, hidden_TN: Tensor, weights_TC: Tensor, ids_TC: Tensor, rows: int, local_E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All-gathers tokens with their routing weights (float32) and expert ids (int32): [Y, N], [Y, C], [Y, C].

        The T tokens of a group are padded to ``rows`` (X) with tokens that chose no expert: their ids are -1. Every
        other id becomes ``local_E[id]`` (int32), this rank's own number for the expert, or -1 for an expert of another
        rank. A minus zero in ``hidden`` may arrive as plus zero.
        """
        missing = (0, 0, 0, rows - hidden_TN.shape[0])
        parts = (F.pad(hidden_TN, missing), F.pad(weights_TC, missing), F.pad(ids_TC, missing, value=-1))
        hidden_YN, weights_YC, ids_YC = all_gather_packed(parts, self)
        return hidden_YN, weights_YC, torch.where(ids_YC >= 0, local_E[ids_YC.clamp(min=0)], -1)


class GroupExchange(TokenExchange):
    """A TokenExchange over a torch.distributed process group of one rank of each group, in group order
    (ParallelDegrees.data_group). Raises CollectiveError where a call fails.

    ``calls``: the log of its calls; by default a new one. ``slower``: why there is no faster one, where one was wanted.
    """

    def __init__(self, group: dist.ProcessGroup, calls: CallLog | None = None, slower: str | None = None) -> None:
        self.group = group
        self.slower = slower
        self.index = dist.get_rank(group)
        self.groups = dist.get_world_size(group)
        self.calls = calls or CallLog(dist.get_process_group_ranks(group)[0])

    def all_gather(self, x_XN: Tensor) -> Tensor:
        out_YN = torch.empty(self.groups * x_XN.shape[0], *x_XN.shape[1:], dtype=x_XN.dtype, device=x_XN.device)
        with self.calls.call("all_gather", x_XN):
            _all_gather(out_YN, x_XN.contiguous(), group=self.group)
        return out_YN

    def reduce_scatter(self, x_YN: Tensor) -> Tensor:
        rows = x_YN.shape[0] // self.groups
        out_XN = torch.empty(rows, *x_YN.shape[1:], dtype=x_YN.dtype, device=x_YN.device)
        with self.calls.call("reduce_scatter", x_YN):
            _reduce_scatter(out_XN, x_YN.contiguous(), group=self.group)
        return out_XN


def all_gather_packed(parts: tuple[Tensor, ...], exchange: TokenExchange) -> list[Tensor]:
    """All-gathers several [X, ...] tensors of any dtypes in one call, as bytes side by side."""
    raw = [part.contiguous().flatten(1).view(torch.uint8) for part in parts]
    gathered = exchange.all_gather(torch.cat(raw, dim=1))
    widths = [part.shape[1] for part in raw]
    return [
        piece.contiguous().view(part.dtype).view(-1, *part.shape[1:])
        for piece, part in zip(torch.split(gathered, widths, dim=1), parts, strict=True)
    ]


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
        self, group: dist.ProcessGroup, device: torch.device, calls: CallLog | None = None,
        limits: ExchangeLimits | None = None,
    ) -> None:  # fmt: skip
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
