"""Exchanges of few rows in one launch each, through memory that every GPU of a node maps; NCCL for the rest.

Knows: which exchanges go through it. Does not know: where such memory works (symmetric_memory.py), how a row travels
(ep_exchange_triton.py, all_reduce_triton.py). Shape letters as in ep_exchange.py.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.call_log import CallLog
from parallel.comm.ep_exchange import GroupExchange
from parallel.comm.peer_buffers import PeerBuffers, memory_bytes
from parallel.comm.symmetric_memory import SentinelMemory, has_dependent_launches, made_where_all_can

ROWS = 512
ROW_BYTES = 16 << 10
# Of what a rank sends all others in an exchange that takes one launch: the most that was measured, between two groups,
# where NCCL was slower throughout (docs/measurements/dp-attention.md).
MOST_BYTES = 512 * 4160
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # those it is tried with
_VECTOR = 16  # bytes of the widest loads and stores
_LOST = "exchanges between groups go through NCCL or gloo, in several launches each"


class SymmetricExchange(GroupExchange):
    """GroupExchange whose exchanges of few rows take one launch.

    What is gathered is the same but for the sign of zeros; sums are added in float32, the first group's part first, and
    rounded once. Which way an exchange goes depends only on what all ranks have alike: number of rows, width and dtype.
    Made by every rank of ``group`` together (a rendezvous). Raises RuntimeError where symmetric memory does not work,
    ImportError without Triton.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, calls: CallLog | None = None) -> None:
        from parallel.comm.all_reduce_triton import summed
        from parallel.comm.ep_exchange_triton import gathered

        super().__init__(group, calls)
        self._memory = SentinelMemory(group, device, memory_bytes(self.groups, ROWS, ROW_BYTES))
        exchanges = torch.zeros(ROWS, dtype=torch.int32, device=device)
        places = PeerBuffers(self._memory.addresses, exchanges, self.index, ROWS, ROW_BYTES)
        pdl = has_dependent_launches(device)
        self._gathered = partial(gathered, places=places, pdl=pdl)
        self._summed = partial(summed, places=places, scatter=True, pdl=pdl)

    def gather_choices(
        self, hidden_TN: Tensor, weights_TC: Tensor, ids_TC: Tensor, rows: int, numbers_E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        width, choices = hidden_TN.shape[1], ids_TC.shape[1]
        if not takes_one_launch(self.groups, rows, width, choices, hidden_TN.dtype):
            return super().gather_choices(hidden_TN, weights_TC, ids_TC, rows, numbers_E)
        with self.calls.call("gather", hidden_TN, rows):
            parts = (hidden_TN.contiguous(), weights_TC.contiguous(), ids_TC.contiguous())
            return self._gathered(*parts, rows, numbers_E)

    def scatter_sum(self, x_YN: Tensor) -> Tensor:
        rows, width = x_YN.shape[0] // self.groups, x_YN.shape[1]
        if not takes_one_launch(self.groups, rows, width, 0, x_YN.dtype):
            return super().scatter_sum(x_YN)
        with self.calls.call("scatter_sum", x_YN):
            return self._summed(x_YN.contiguous())[0]


def takes_one_launch(groups: int, rows: int, width: int, choices: int, dtype: torch.dtype) -> bool:
    """Whether an exchange of so many rows a group does, each with a weight and an id of so many choices."""
    hidden_bytes = width * dtype.itemsize
    row_bytes = hidden_bytes + 8 * choices
    if dtype not in DTYPES or hidden_bytes % _VECTOR or not 0 < row_bytes <= ROW_BYTES or not 0 < rows <= ROWS:
        return False
    return (groups - 1) * rows * row_bytes <= MOST_BYTES


def fastest_exchange(group: dist.ProcessGroup, device: torch.device, calls: CallLog | None = None) -> GroupExchange:
    """SymmetricExchange where every rank can have one, GroupExchange otherwise, the same on all ranks.

    Called by every rank of ``group`` together, before any graph is captured. The fallback is logged once, with why.
    """
    make = partial(SymmetricExchange, group, device, calls)
    made = made_where_all_can(group, device, make, partial(_exchanges_right, device=device), _LOST)
    return GroupExchange(group, calls) if made is None else made


def _exchanges_right(made: SymmetricExchange, device: torch.device) -> bool:
    """There and back with every dtype: a row a group with a choice and none, filled up to two rows."""
    ids_TC = torch.tensor([[made.index, -1]], dtype=torch.int32, device=device)
    weights_TC = (ids_TC + 1).float()
    numbers_E = torch.arange(3, 3 + made.groups, dtype=torch.int32, device=device)
    groups = range(made.groups)
    numbers = [row for group in groups for row in ([group + 3, -1], [-1, -1])]
    weights = [row for group in groups for row in ([group + 1, 0], [0, 0])]
    hidden = [row for group in groups for row in ([group + 1] * 8, [0] * 8)]
    total = [[made.groups * (made.index + 1)] * 8, [0] * 8]
    found = []
    for dtype in DTYPES:
        hidden_TN = torch.full((1, 8), made.index + 1, dtype=dtype, device=device)
        gathered = made.gather_choices(hidden_TN, weights_TC, ids_TC, 2, numbers_E)
        found.append([part.tolist() for part in (*gathered, made.scatter_sum(gathered[0]))])
    return found == [[hidden, weights, numbers, total]] * len(DTYPES)
