"""Slots with random records, row maps over them and a result ring, for tests of a step's ends on two devices.

Knows: what kernels of these ends read and write, and how two states are compared bit for bit. Does not know: kernels.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from runtime.execute.result_ring import ResultRing
from runtime.execute.slot_state import SlotTables
from runtime.schedule.request import FinishReason

BLOCK_SIZE = 16


class Case(NamedTuple):
    """Slots with random records, a row map over some of them, and the ring; ``on`` copies all of it."""

    tables: SlotTables
    ring: ResultRing
    rows_B: Tensor

    def on(self, device: str) -> Case:
        tables, ring = self.tables, self.ring
        history = 0 if tables.history_SL is None else tables.history_SL.shape[1]
        sizes = tables.slots - 1, tables.max_blocks, ring.entries, tables.stop_ids, ring.width, history
        same = empty_case(device, *sizes, groups=len(tables.block_tables_GSP))
        for ours, theirs in zip(state_of(same), state_of(self), strict=True):
            ours.copy_(theirs)
        return same._replace(rows_B=self.rows_B.to(device))


def empty_case(
    device: str, slots: int, blocks: int, entries: int, stop_ids: int, width: int = 1, history: int = 0, groups: int = 1
) -> Case:
    on_gpu = torch.device(device).type == "cuda"

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def pinned(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)

    compute = SimpleNamespace(submit=lambda work: work(), synchronize=lambda: None)
    played = cast(Any, SimpleNamespace(zeros=zeros, pinned=pinned, compute=compute))
    tables = SlotTables(
        played,
        max_requests=slots,
        max_blocks=blocks,
        vocab_size=1,
        stop_ids=stop_ids,
        history=history,
        groups=groups,
    )
    ring = ResultRing(played, entries=entries, rows=slots + 5, width=width, reported=4, direct=on_gpu)
    return Case(tables, ring, zeros(0, dtype=torch.int64))


def state_of(case: Case) -> tuple[Tensor, ...]:
    tables, ring = case.tables, case.ring
    histories = () if tables.history_SL is None else (tables.history_SL[1:],)  # that of slot 0 nobody reads
    return tables.columns.records, tables.block_tables_GSP, ring.stored_EX, ring.appended_1, *histories


def random_case(
    seed: int,
    rows: int,
    blocks: int,
    *,
    ended: float = 0.3,
    padding: int = 0,
    stop_ids: int = 16,
    width: int = 1,
    history: bool = False,
) -> Case:
    """``padding`` of the rows are slot 0's; ``ended``: the share of the other slots that ended: ghost rows. Of one to
    three groups of layers."""
    rng = np.random.default_rng(seed)
    slots = max(rows, 2)
    positions, groups = (blocks + 2) * BLOCK_SIZE if history else 0, 1 + seed % 3
    case = empty_case("cpu", slots, blocks, 4, stop_ids, width, positions, groups)
    tables, ring = case.tables, case.ring
    records, columns = tables.columns.records, tables.columns
    records.copy_(torch.from_numpy(rng.integers(-(2**31), 2**31, tuple(records.shape), dtype=np.int32)))
    columns.length[1:] = torch.from_numpy(rng.integers(1, blocks * BLOCK_SIZE + 1, slots, dtype=np.int32))
    columns.finished[0] = int(FinishReason.STOP)
    columns.finished[1:] = torch.from_numpy(np.where(rng.random(slots) < ended, rng.integers(1, 4, slots), 0))
    columns.max_length[1:] = columns.length[1:] + torch.from_numpy(rng.integers(1, 3, slots, dtype=np.int32))
    columns.min_length[1:] = columns.length[1:] - torch.from_numpy(rng.integers(-1, 2, slots, dtype=np.int32))
    for table_SP in tables.block_tables_GSP:
        table_SP[1:] = torch.from_numpy(rng.integers(1, 2**31, (slots, blocks), dtype=np.int32))
    ring.buffer_EX.copy_(torch.from_numpy(rng.integers(0, 99, tuple(ring.buffer_EX.shape), dtype=np.int32)))
    ring.appended_1.fill_(seed)
    real = 1 + rng.permutation(slots)[: rows - padding]
    return case._replace(rows_B=torch.from_numpy(rng.permutation(np.concatenate([real, np.zeros(padding, np.int64)]))))


def same(found: Tensor, wanted: Tensor, what: object) -> None:
    assert found.dtype == wanted.dtype, what
    assert found.shape == wanted.shape, what
    if found.is_floating_point():  # random bits: NaN among them
        found, wanted = found.contiguous().view(torch.int32), wanted.contiguous().view(torch.int32)
    assert torch.equal(found.cpu(), wanted.cpu()), what


def same_state(found: Case, wanted: Case) -> None:
    if found.ring.direct:
        torch.cuda.synchronize()  # kernels store into the ring, and nothing waits for them to read it
    names = ("records", "blocks", "ring", "counter", "history")
    for ours, theirs, what in zip(state_of(found), state_of(wanted), names, strict=False):
        same(ours, theirs, what)
