"""Copies what a plan changes to the device in one transfer; no transfer if nothing changed.

Knows: the ring the changes travel through, and when its memory may be written again.
Does not know: what a plan's changes are (packing.py), how attention is planned (models/kernels/attention), or what
reads the tables afterwards (step/).

    stage (host)     pack into a pinned ring entry            after the entry's last copy has left it   (host waits)
    stage stream     pinned entry -> device entry, one copy   after the entry's last apply has read it  (event)
    apply (compute)  device entry -> tables, row map, chunks, after the copy                            (event)
                                     attention's plan

Both waits are long over in a running chain; ``waits`` counts those of the host that were not.
The copies have a separate stream: after a result's copy they would wait for the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.inputs import StateRows
from runtime.execute.device.protocol import Device, Event
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.packing import kept_states, pack
from runtime.execute.slot_state import SlotTables
from runtime.schedule.plan import PADDING_SLOT, TRASH_BLOCK, StepKind

MakePlan = Callable[[LaunchSpec], npt.NDArray[np.int32] | None]

_ALIGNMENT = 16
_ID_STRIDE = 7919  # a prime: ids of neighbours lie far apart, and none comes twice before all have come
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.float32): torch.float32,
}


@dataclass(frozen=True, slots=True)
class Chunks:
    """Tokens and rows of a step with chunks on the device, int64; views that stay right until the next is applied.

    token_ids_T, positions_T, slots_T: each new token, its position and its slot. Of a decode row the host knows
    neither: the position is NEWEST, the id 0; of its drafts, if any, NEWEST - 1 and so on. slots_R: each
    row's slot; emitting_R: the same where the row decodes or its chunk is the last, the padding slot elsewhere, so that
    sampling into ``emitting_R`` masks the others; logit_rows_R: where in T each row's last token is; decodes_R: 1 where
    the row decodes. A fork has no tokens: its slot is in ``emitting_R`` only, and its logit row is that of the chunk
    after which it samples. R is the step's bucket; rows past its real ones are slot 0 and logit row 0. scored_2S: of
    each prompt token that is scored, where in T the token before it is, and its id; None when there is none.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    slots_R: Tensor
    emitting_R: Tensor
    logit_rows_R: Tensor
    decodes_R: Tensor
    scored_2S: Tensor | None = None

    def state_rows(self, ghosts_R: Tensor | None = None) -> StateRows:
        """Whose state each row continues, and where its tokens end; rows past the real ones end where the last does.

        ``ghosts_R`` bool: rows of no request.
        """
        slots_R = self.slots_R if ghosts_R is None else torch.where(ghosts_R, PADDING_SLOT, self.slots_R)
        return StateRows(slots_R, (self.logit_rows_R + 1).cummax(0).values)


@dataclass(slots=True)
class StagingCounters:
    """host_to_device_bytes and copies; waits: the host had to wait for a ring entry; growths: one was too small."""

    host_to_device_bytes: int = 0
    copies: int = 0
    waits: int = 0
    growths: int = 0


@dataclass(slots=True)
class _Entry:
    """One ring entry: bytes on both sides, and the events after which each side may be written again."""

    host: Tensor
    device: Tensor
    copied: Event
    applied: Event


@dataclass(frozen=True, slots=True)
class Staged:
    """A step's changes on their way: to be given to ``Staging.apply``, once."""

    spec: LaunchSpec
    changes: dict[str, Tensor]
    entry: _Entry


class Staging:
    """One a rank. ``stage`` then ``apply``, each step, on the thread that launches; every method returns at once.

    ``entries`` of the ring: more than steps are ever in flight, or the host waits for the oldest (``waits``).
    """

    def __init__(
        self, device: Device, tables: SlotTables, *, max_prefill_tokens: int, max_rows: int, entries: int
    ) -> None:
        self.counters = StagingCounters()
        self._device = device
        self._tables = tables
        self._stream = device.stream("stage")
        self._row_maps: dict[tuple[str, int], Tensor] = {}
        self._mapped: dict[tuple[str, int], tuple[int, ...]] = {}  # the slots that each row map holds
        self._chunk_tokens_3T = device.zeros(3, max_prefill_tokens, dtype=torch.int64)
        self._chunk_rows_4R = device.zeros(4, max_rows, dtype=torch.int64)
        self._scored_2T = device.zeros(2, max_prefill_tokens, dtype=torch.int64)
        self._copied_blocks_2R = device.zeros(2 * len(tables.block_tables_GSP), max_rows, dtype=torch.int64)
        self._kept_2R = device.zeros(2, max_rows, dtype=torch.int64)
        # Of a token its id, position and slot, and what is scored or an entry of attention's plan: never both.
        expected_bytes = max_rows * (tables.record_dtype.itemsize + 256) + max_prefill_tokens * 40 + 1024
        self._entries = [self._new_entry(expected_bytes) for _ in range(entries)]
        self._used = 0
        self._unapplied: int | None = None
        self._attention_plans: dict[str, tuple[MakePlan, Tensor]] = {}
        self.on_seated: Callable[[Tensor], None] | None = None  # called with the slots (int64) of new requests
        self.on_restored: Callable[[Tensor], None] | None = (
            None  # called with rows of state banks, [2, H]: from which, to which
        )
        self.on_forked: Callable[[Tensor, Tensor | None], None] | None = None  # the same, and blocks, before all else

    # ---- what the steps read ----

    def row_map(self, role: str, bucket: int) -> Tensor:
        """row -> slot of a role's steps with that many rows, int64 [bucket]; always the same tensor."""
        key = role, bucket
        if key not in self._row_maps:
            self._row_maps[key] = self._device.zeros(bucket, dtype=torch.int64)
        return self._row_maps[key]

    def padded_chunks(self, tokens: int) -> Chunks:
        """Where the first ``tokens`` of any plan with chunks are, and as many rows as so many tokens can be; always the
        same memory. Past the plan's is the padding that ``spec.captured`` asked for.
        """
        return Chunks(*self._chunk_tokens_3T[:, :tokens], *self._chunk_rows_4R[:, :tokens])

    @contextmanager
    def real_padding(self, vocab_size: int, block: int, group: int = 0) -> Iterator[Callable[[Sequence[int]], None]]:
        """Inside, padding is computed as tokens are: each another id, in every ``group`` that measures with this one,
        its KV in ``block``, which is unused yet. What is yielded makes it prompts of so many tokens each, one after
        the other, from their first token on, in the slots from 1 on.

        For start-up, before any request is admitted, for steps of padding: experts compute no padding, equal
        tokens choose equal ones, and recurrent layers may return anything of a token in no row or in the null slot's.
        """
        ids_T, positions_T, slots_T = self._chunk_tokens_3T
        slots_R, _, logit_rows_R, _ = self._chunk_rows_4R
        tables_GSP, compute = self._tables.block_tables_GSP, self._device.compute
        staged = positions_T, slots_T, slots_R, logit_rows_R

        def prompts(lengths: Sequence[int]) -> None:
            lengths = lengths[: self._tables.slots - 1]
            slots, each = torch.arange(1, 1 + len(lengths)), torch.tensor(lengths)
            positions = torch.cat([torch.arange(length) for length in lengths])
            made = positions, slots.repeat_interleave(each), slots, each.cumsum(0) - 1

            def work() -> None:
                for tensor, numbers in zip(staged, made, strict=True):
                    tensor.zero_()
                    tensor[: len(numbers)].copy_(numbers)
                tables_GSP[:, : 1 + len(slots)].fill_(block)
                if self.on_seated is not None:
                    self.on_seated(slots.to(tables_GSP.device))

            compute.submit(work)

        first, end = group * len(ids_T), (group + 1) * len(ids_T)
        compute.submit(lambda: ids_T.copy_(torch.arange(first, end, device=ids_T.device) * _ID_STRIDE % vocab_size))
        try:
            yield prompts
        finally:
            for tensor in (ids_T, *staged):
                compute.submit(tensor.zero_)
            compute.submit(lambda: tables_GSP.fill_(TRASH_BLOCK))

    @property
    def max_rows(self) -> int:
        """Rows that a plan with chunks may have."""
        return self._chunk_rows_4R.shape[1]

    def chunks(self, spec: LaunchSpec) -> Chunks:
        """Where a plan's chunks are once its changes are applied."""
        tokens, scored = spec.plan.packed_tokens, spec.plan.scored_tokens
        chunks = Chunks(*self._chunk_tokens_3T[:, :tokens], *self._chunk_rows_4R[:, : spec.shape.rows])
        return replace(chunks, scored_2S=self._scored_2T[:, :scored]) if scored else chunks

    def copied_blocks(self, spec: LaunchSpec) -> Tensor:
        """int64 [2, C], of each group: blocks, and those that get their contents after the forward pass; C may be 0."""
        return self._copied_blocks_2R[:, : sum(fork.copied is not None for fork in spec.plan.forks)]

    def kept_states(self, spec: LaunchSpec) -> Tensor:
        """int64 [2, C]: rows of state banks, and those that get their contents after the step; C may be 0."""
        return self._kept_2R[:, : kept_states(spec.plan)]

    def bring_attention_plans(self, role: str, make: MakePlan, place_E4: Tensor) -> None:
        """From now on with every step of that role that has one: ``make(spec)``, int32 [X, 4], to the beginning of
        ``place_E4``, before the step's work. For start-up.

        None of a step that reads none; ValueError of one for whose plan there is no room.
        """
        self._attention_plans[role] = make, place_E4

    # ---- each step ----

    def stage(self, spec: LaunchSpec) -> Staged | None:
        """Pack what the step changes and start its copy; None when it changes nothing. ValueError for a bad plan.

        What it returns must be applied before the next step is staged (RuntimeError): it lives in the ring.
        """
        if self._unapplied is not None:
            raise RuntimeError(f"step {spec.plan.step} is staged, but step {self._unapplied} was not applied")
        plan, row_map = spec.plan, (spec.role, spec.shape.rows)
        mapped = self._mapped.get(row_map)
        tables_change = plan.slot_writes or plan.slot_updates or plan.block_writes or plan.copies or plan.constrained
        if mapped is plan.slots and plan.kind is StepKind.DECODE and not tables_change:
            return None  # as in most decode steps
        packed = pack(spec, self._tables, mapped, self.max_rows)
        self._check_room(spec.plan.step, packed)
        if spec.role in self._attention_plans:
            make, _ = self._attention_plans[spec.role]
            if (entries_E4 := make(spec)) is not None:
                packed["attention_E4"] = entries_E4
        total = sum(_aligned(array.nbytes) for array in packed.values())
        if total == 0:
            return None
        entry = self._next_entry(total)
        host, changes, offset = entry.host.numpy(), dict[str, Tensor](), 0
        for name, array in packed.items():
            host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
            raw = entry.device[offset : offset + array.nbytes]
            changes[name] = raw.view(_TORCH_DTYPES[array.dtype]).view(array.shape)
            offset += _aligned(array.nbytes)
        self._send(entry, total)
        if "row_map_B" in packed:
            self._mapped[row_map] = spec.plan.slots
        self._unapplied = spec.plan.step
        return Staged(spec, changes, entry)

    def apply(self, staged: Staged) -> None:
        """Put staged changes into force on the compute stream, before the step's work."""
        tables, changes = self._tables, staged.changes
        row_map = self.row_map(staged.spec.role, staged.spec.shape.rows) if "row_map_B" in changes else None
        chunks = (self._chunk_tokens_3T, self._chunk_rows_4R, self._scored_2T, self._copied_blocks_2R, self._kept_2R)

        def work() -> None:
            if "forked_2C" in changes and self.on_forked is not None:
                self.on_forked(changes["forked_2C"], changes.get("forked_blocks_2C"))
            apply_changes(changes, tables, row_map, *chunks)
            if "attention_E4" in changes:
                place_E4, entries_E4 = self._attention_plans[staged.spec.role][1], changes["attention_E4"]
                place_E4[: len(entries_E4)].copy_(entries_E4)
            if "seated_H" in changes and self.on_seated is not None:
                self.on_seated(changes["seated_H"])
            if "restored_2H" in changes and self.on_restored is not None:
                self.on_restored(changes["restored_2H"])

        self._device.compute.wait(staged.entry.copied)
        self._device.compute.submit(work)
        self._device.compute.record(staged.entry.applied)
        self._unapplied = None

    def _check_room(self, step: int, packed: dict[str, npt.NDArray[Any]]) -> None:
        for what, chunk_array, room, option in (
            ("prefill tokens", packed.get("chunk_tokens_3T"), self._chunk_tokens_3T, "--max-num-batched-tokens"),
            ("prefill rows", packed.get("chunk_rows_4R"), self._chunk_rows_4R, "--max-num-seqs"),
        ):
            if chunk_array is not None and chunk_array.shape[1] > room.shape[1]:
                wanted = chunk_array.shape[1]
                raise ValueError(f"step {step}: {wanted} {what}, there is room for {room.shape[1]}; see {option}")

    # ---- the ring ----

    def _new_entry(self, size: int) -> _Entry:
        host = self._device.pinned(size, dtype=torch.uint8)
        entry = _Entry(host, self._device.empty(size, dtype=torch.uint8), self._device.event(), self._device.event())
        self._device.compute.record(entry.applied)  # the memory may be a recycled one that compute still reads
        return entry

    def _next_entry(self, size: int) -> _Entry:
        index = self._used % len(self._entries)
        self._used += 1
        if size > self._entries[index].host.numel():
            self._entries[index].applied.synchronize()
            self._entries[index] = self._new_entry(1 << (size - 1).bit_length())
            self.counters.growths += 1
        self._await_copied(self._entries[index])
        return self._entries[index]

    def _await_copied(self, entry: _Entry) -> None:
        """The host may write the entry only when its last copy has read it."""
        if not entry.copied.query():
            self.counters.waits += 1
            entry.copied.synchronize()

    def _await_applied(self, entry: _Entry) -> None:
        """The copy may write the device entry only when the last apply has read it."""
        self._stream.wait(entry.applied)

    def _send(self, entry: _Entry, size: int) -> None:
        source, target = entry.host[:size], entry.device[:size]
        self._await_applied(entry)
        self._stream.submit(lambda: target.copy_(source, non_blocking=True))
        self._stream.record(entry.copied)
        self.counters.host_to_device_bytes += size
        self.counters.copies += 1


def apply_changes(
    changes: dict[str, Tensor],
    tables: SlotTables,
    row_map: Tensor | None,
    chunk_tokens_3T: Tensor,
    chunk_rows_4R: Tensor,
    scored_2T: Tensor,
    copied_blocks_2R: Tensor,
    kept_2R: Tensor,
) -> None:
    """Scatter staged changes into their tables: a few kernels, none without a change, no synchronisation."""
    if "slots_N" in changes:
        tables.columns.records.index_copy_(0, changes["slots_N"], changes["records_NX"])
    if "updates_3U" in changes:
        tables.move_ends(*changes["updates_3U"])
    if "cells_M" in changes:
        tables.block_tables_GSP.view(-1).index_copy_(0, changes["cells_M"], changes["blocks_M"])
    if "history_T" in changes and tables.history_SL is not None:
        tables.history_SL.view(-1).index_copy_(0, changes["history_cells_T"], changes["history_T"])
    for feature in tables.features:
        feature.load(changes)
    if row_map is not None:
        row_map.copy_(changes["row_map_B"])
    for name, place in (
        ("chunk_tokens_3T", chunk_tokens_3T),
        ("chunk_rows_4R", chunk_rows_4R),
        ("scored_2S", scored_2T),
        ("copied_blocks_2C", copied_blocks_2R),
        ("kept_2C", kept_2R),
    ):
        if name in changes:
            place[:, : changes[name].shape[1]].copy_(changes[name])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
