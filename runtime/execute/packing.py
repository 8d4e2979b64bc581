"""What a plan changes on the device, as flat host arrays.

Knows: the arrays one step's changes consist of, and which plans cannot be packed.
Does not know: how the arrays travel (staging.py), streams, events, tensors.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.slot_state import NEWEST, SlotTables, fill_record
from runtime.schedule.plan import PADDING_SLOT, Fork, SlotCopy, StepKind, StepPlan

_Array = npt.NDArray[Any]


def pack(spec: LaunchSpec, tables: SlotTables, mapped: tuple[int, ...] | None, max_rows: int) -> dict[str, _Array]:
    """Everything the step changes, by name. ``mapped``: the slots that its row map holds already, known by identity.

    Chunks are filled up to ``spec.captured`` with tokens of the padding slot, whose KV goes to the trash block,
    and with rows of it up to as many as so many tokens can be, ``max_rows`` at most.
    ValueError, naming the step, for a plan that writes one place twice or outside the tables.

    slots_N int64 and records_NX int32: slot records (slot_state.py); seated_H int64: those of them whose state begins
    anew. updates_3U int64: slots whose end moves, where it is then, and whether they are revived. cells_M int64, flat
    indices into the block table, and blocks_M int32. row_map_B int64. chunk_tokens_3T int64: token ids, positions,
    slots; chunk_rows_4R int64: slots, emitting slots, logit rows, which decode; scored_2S int64 (see Chunks).
    history_cells_T int64, flat indices into the table of histories, and history_T int32: the tokens that slots begin
    with, where histories are kept. copied_blocks_2C int64: blocks, and those that get their contents after the step's
    forward pass, two rows a group of layers. restored_2H int64: rows of state banks (cache/pool.py), and those that get
    their contents before it; kept_2C int64: the same after it, of forks and snapshots. forked_2C and forked_blocks_2C
    int64: rows of state banks and blocks, and those that get their contents before anything else happens. Of slot
    features: what each writes.
    """
    plan = spec.plan
    packed: dict[str, _Array] = {}
    if plan.slot_writes:
        _pack_slots(packed, plan, tables)
    if plan.constrained:
        for feature in tables.features:
            packed |= feature.constrain(plan.constrained)
    if plan.slot_updates:
        _pack_updates(packed, plan, tables)
    if plan.block_writes:
        _pack_blocks(packed, plan, tables)
    if plan.copies:
        _pack_copies(packed, plan, tables)
    if spec.kind is not StepKind.DECODE:
        _pack_chunks(packed, spec, max_rows)
        if plan.scored_tokens:
            _pack_scored(packed, plan)
        if copied := _copied(plan.forks):
            packed["copied_blocks_2C"] = np.array(copied, np.int64).T.copy()
        _pack_states(packed, plan, tables)
    elif mapped is not plan.slots:
        packed["row_map_B"] = np.full(spec.shape.rows, PADDING_SLOT, np.int64)
        packed["row_map_B"][: len(plan.slots)] = plan.slots
    return packed


def _integers(numbers: Sequence[int]) -> _Array:
    """As integers [n], read-only: in a third of the time that numpy needs to find out what a tuple holds."""
    if isinstance(numbers, array):
        return np.frombuffer(numbers, numbers.typecode)
    return np.frombuffer(struct.pack(f"{len(numbers)}q", *numbers), np.int64)


def _check_slots(plan: StepPlan, what: str, slots: _Array, tables: SlotTables) -> None:
    """Real slots only: an index past a table would be written to other memory."""
    if slots.min() <= PADDING_SLOT or slots.max() >= tables.slots:
        raise ValueError(
            f"step {plan.step}: {what} names slots {slots.min()}..{slots.max()}, the slots are 1..{tables.slots - 1}"
        )


def _check_distinct(plan: StepPlan, what: str, keys: _Array) -> None:
    """Two writes of one place have no order on the device."""
    if len(set(keys.tolist())) != len(keys):
        raise ValueError(f"step {plan.step}: two {what} for the same place; a plan names each place once")


def _pack_slots(packed: dict[str, _Array], plan: StepPlan, tables: SlotTables) -> None:
    slots_N = np.array([write.slot for write in plan.slot_writes], np.int64)
    _check_slots(plan, "a slot write", slots_N, tables)
    _check_distinct(plan, "slot writes", slots_N)
    records_N = np.zeros(len(slots_N), tables.record_dtype)
    for index, write in enumerate(plan.slot_writes):
        fill_record(records_N[index : index + 1], write, tables.stop_ids)
    packed["slots_N"] = slots_N
    restored = {slot for _, slot in plan.restored}
    if seated := [w.slot for w in plan.slot_writes if not (w.resumes or w.slot in restored)]:
        packed["seated_H"] = np.array(seated, np.int64)
    packed["records_NX"] = records_N.view(np.int32).reshape(len(slots_N), tables.record_words)
    if tables.history_SL is not None:
        positions = tables.history_SL.shape[1]
        cells = [write.slot * positions + np.arange(len(write.token_ids)) for write in plan.slot_writes]
        packed["history_cells_T"] = np.concatenate(cells)
        packed["history_T"] = np.concatenate([np.array(write.token_ids, np.int32) for write in plan.slot_writes])
    for feature in tables.features:
        packed |= feature.write(plan.slot_writes)


def _pack_updates(packed: dict[str, _Array], plan: StepPlan, tables: SlotTables) -> None:
    updates_U3 = [(update.slot, update.max_length, update.revive) for update in plan.slot_updates]
    packed["updates_3U"] = np.array(updates_U3, np.int64).T.copy()
    slots_U = packed["updates_3U"][0]
    _check_slots(plan, "a slot update", slots_U, tables)
    written = slots_U if "slots_N" not in packed else np.concatenate((slots_U, packed["slots_N"]))
    _check_distinct(plan, "slot updates or writes", written)


def _pack_blocks(packed: dict[str, _Array], plan: StepPlan, tables: SlotTables) -> None:
    count = len(plan.block_writes)
    slots_M, indices_M, blocks_M = _integers(tuple(chain.from_iterable(plan.block_writes))).reshape(count, 3).T
    _check_slots(plan, "a block write", slots_M, tables)
    groups, slots, most = tables.block_tables_GSP.shape
    if indices_M.min() < 0 or indices_M.max() >= groups * most:
        raise ValueError(
            f"step {plan.step}: a block write names block {indices_M.max()} of a request, the block table has "
            f"{groups * most}; see --max-model-len"
        )
    groups_M, indices_M = np.divmod(indices_M, most)
    packed["cells_M"] = (groups_M * slots + slots_M) * most + indices_M
    _check_distinct(plan, "block writes", packed["cells_M"])
    packed["blocks_M"] = blocks_M.astype(np.int32)


def _pack_copies(packed: dict[str, _Array], plan: StepPlan, tables: SlotTables) -> None:
    """One launch copies all, in no order: what one reads no other may write."""
    pairs = [(copy.source, copy.slot) for copy in plan.copies]
    blocks = _copied(plan.copies)
    by_group = [("blocks", [(row[2 * group], row[2 * group + 1]) for row in blocks]) for group in _groups(blocks)]
    for what, two in (("slots", pairs), *by_group):
        targets = {target for _, target in two}
        if len(targets) < len(two) or any(source in targets for source, _ in two):
            raise ValueError(f"step {plan.step}: copies of {what} {two} write what one of them reads or writes")
    packed["forked_2C"] = np.array(pairs, np.int64).T.copy()
    _check_slots(plan, "a copy", packed["forked_2C"], tables)
    if blocks:
        packed["forked_blocks_2C"] = np.array(blocks, np.int64).T.copy()


def _copied(copies: Sequence[Fork | SlotCopy]) -> list[tuple[int, ...]]:
    """Of each that copies blocks: (block, its own) of every group, one after the other."""
    return [(*c.copied, *chain.from_iterable(c.in_windows)) for c in copies if c.copied is not None]


def _groups(copied: Sequence[tuple[int, ...]]) -> range:
    return range(len(copied[0]) // 2 if copied else 0)


def kept_states(plan: StepPlan) -> int:
    """Rows of state that are copied after the step."""
    return len(plan.forks) + len(plan.saved)


def _pack_states(packed: dict[str, _Array], plan: StepPlan, tables: SlotTables) -> None:
    """Snapshots lie after slots in the banks of state."""
    last_slot = tables.slots - 1
    if plan.restored:
        restored = [(last_slot + snapshot, slot) for snapshot, slot in plan.restored]
        packed["restored_2H"] = np.array(restored, np.int64).T.copy()
    if kept_states(plan):
        kept = [(plan.chunks[fork.chunk].slot, fork.slot) for fork in plan.forks]
        kept += [(slot, last_slot + snapshot) for slot, snapshot in plan.saved]
        packed["kept_2C"] = np.array(kept, np.int64).T.copy()
        _check_distinct(plan, "copies of state", packed["kept_2C"][1])


def _pack_chunks(packed: dict[str, _Array], spec: LaunchSpec, max_rows: int) -> None:
    plan, decoding, chunked = spec.plan, spec.plan.decode_rows, spec.plan.decode_rows + len(spec.plan.chunks)
    width, windows = plan.row_tokens, decoding * plan.row_tokens  # tokens of a decode row, and of all of them
    lengths = [len(chunk.token_ids) for chunk in plan.chunks]
    tokens_3T = np.full((3, max(plan.packed_tokens, spec.captured)), PADDING_SLOT, np.int64)
    slots_R = _integers(plan.slots)
    tokens_3T[1, :windows] = np.tile(NEWEST - np.arange(width), decoding)
    tokens_3T[2, :windows] = np.repeat(slots_R[:decoding], width)
    offset = windows
    for chunk, length in zip(plan.chunks, lengths, strict=True):
        here = slice(offset, offset + length)
        tokens_3T[0, here] = _integers(chunk.token_ids)
        tokens_3T[1, here] = np.arange(chunk.start, chunk.start + length)
        tokens_3T[2, here] = chunk.slot
        offset += length
    # Drafts are proposed for as many rows as there are graphs for: none of them may be one of the step before.
    rows_4R = np.zeros((4, max(spec.shape.rows, spec.shape.proposing, min(spec.captured, max_rows))), np.int64)
    real = len(plan.slots)
    ends = windows + np.cumsum(lengths) - 1
    rows_4R[0, :chunked] = slots_R[:chunked]
    rows_4R[1, :decoding] = slots_R[:decoding]
    rows_4R[1, decoding:chunked] = [chunk.slot if chunk.last else PADDING_SLOT for chunk in plan.chunks]
    rows_4R[1, chunked:real] = slots_R[chunked:]
    rows_4R[2, :decoding] = np.arange(width - 1, windows, width)
    rows_4R[2, decoding:chunked] = ends
    rows_4R[2, chunked:real] = ends[[fork.chunk for fork in plan.forks]]
    rows_4R[3, :decoding] = 1
    packed["chunk_tokens_3T"], packed["chunk_rows_4R"] = tokens_3T, rows_4R


def _pack_scored(packed: dict[str, _Array], plan: StepPlan) -> None:
    packed["scored_2S"] = np.empty((2, plan.scored_tokens), np.int64)
    chunk_at, offset = plan.decode_rows * plan.row_tokens, 0
    for chunk in plan.chunks:
        if (scored := chunk.scored) is not None:
            here = slice(offset, offset + len(scored.token_ids))
            before = chunk_at + scored.start - 1 - chunk.start
            packed["scored_2S"][0, here] = np.arange(before, before + len(scored.token_ids))
            packed["scored_2S"][1, here] = scored.token_ids
            offset = here.stop
        chunk_at += len(chunk.token_ids)
