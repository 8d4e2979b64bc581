"""Tables of grammars on the device: a row's mask and the state after its token, in the step, without the host.

Knows: where tables lie, a state by slot, the states of draft tokens, how the host writes them; draft tokens that a
grammar without a table forces. Does not know: what a table means (token_table.py of runtime/grammar_tables), which
requests have one (schedule/tables.py), biases and bad words, with which logit_edits.py applies its mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.execute.device.protocol import Device
from runtime.execute.sampling.kernels import kernels_for
from runtime.execute.slots.feature import RowView
from runtime.grammar_tables.token_table import MOST_ENTRIES, SINK, START, TokenTable
from runtime.schedule.plan import Constrained, SlotWrite

BEGIN, NEXT, CLASSES, STATE = range(4)  # columns of ``rows_S4``
MOST_FORCED = 15  # draft tokens of a row


class TokenTables(NamedTuple):
    """``pool_PE`` int16: in each place the classes of all ids, then the next states by state and class. ``rows_S4``
    int32: of each slot where these two begin in the pool, the number of classes (0: no table), the state. ``forced_SF``
    int32, of slots without a table: 1 + the token that alone may follow the last one, the first draft token and so on;
    0 from where that is not so."""

    pool_PE: Tensor
    rows_S4: Tensor
    forced_SF: Tensor


class TablePlaces:
    """What the host has staged. ``placed``: the key of the table in each place; ``held``: the slots that have one."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.placed: dict[int, bytes] = {}
        self.held: set[int] = set()

    def make(self, device: Device, slots: int, places: int) -> TokenTables:
        entries = self.vocab_size + (MOST_ENTRIES if places else 1)
        pool_PE = device.zeros(max(places, 1), entries + entries % 2, dtype=torch.int16)
        numbers, int32 = device.zeros, torch.int32
        return TokenTables(pool_PE, numbers(slots, 4, dtype=int32), numbers(slots, MOST_FORCED, dtype=int32))

    def write(self, writes: Sequence[SlotWrite]) -> dict[str, npt.NDArray[Any]]:
        """As SlotFeature.write."""
        freed = self.held.intersection(write.slot for write in writes)
        self.held -= freed
        return {"tableless_T": np.array(sorted(freed))} if freed else {}

    def constrain(
        self, rows: Sequence[Constrained], made: Mapping[bytes, TokenTable], size: int
    ) -> dict[str, npt.NDArray[Any]]:
        """As SlotFeature.constrain, of rows with a place. ``made``: tables by key. ``size``: entries of a place."""
        staged: dict[str, npt.NDArray[Any]] = {}
        numbers = []
        for row in rows:
            assert row.place is not None
            table, begin = made[row.key], row.place * size
            state = table.after(row.token_ids)
            numbers.append((row.slot, begin, begin + self.vocab_size, table.next_SK.shape[1], state))
            if self.placed.get(row.place) != row.key:
                self.placed[row.place] = row.key
                both = np.concatenate((table.class_V, table.next_SK.ravel()))
                staged[f"table_{row.place}"] = np.pad(both, (0, len(both) % 2)).view(np.int32)
        if numbers:
            self.held.update(slot for slot, *_ in numbers)
            staged["tabled_T5"] = np.array(numbers)
        return staged


def load_tables(tables: TokenTables, staged: Mapping[str, Tensor]) -> None:
    """On the device, what TablePlaces staged."""
    if "tableless_T" in staged:
        tables.rows_S4.index_fill_(0, staged["tableless_T"], 0)
    if "tabled_T5" in staged:
        slots_T, rows_T4 = staged["tabled_T5"][:, 0], staged["tabled_T5"][:, 1:]
        tables.rows_S4.index_copy_(0, slots_T, rows_T4.to(torch.int32))
        for place in range(len(tables.pool_PE)):
            if (words := staged.get(f"table_{place}")) is not None:
                tables.pool_PE.view(torch.int32)[place, : len(words)].copy_(words)


def _next_states(tables: TokenTables, rows_B4: Tensor, states_B: Tensor, tokens_B: Tensor) -> Tensor:
    """After one token each (int64), int32; of a row without a table any number."""
    pool, rows_B4 = tables.pool_PE.view(-1), rows_B4.to(torch.int64)
    classes_B = pool.gather(0, rows_B4[:, BEGIN] + tokens_B.clamp(min=0))
    return pool.gather(0, rows_B4[:, NEXT] + states_B * rows_B4[:, CLASSES] + classes_B).to(torch.int32)


def table_states(tables: TokenTables, view: RowView) -> Tensor:
    """The state at each of a row's W tokens, int32 [B, W]. After a draft token that may not follow, or that ends the
    text, no sample counts: there it is the first state, which leaves something to sample. In rows without a table:
    ``forced_SF``, by token; in a tree, too, whose first nodes are a chain."""
    kernels = kernels_for(tables.pool_PE)
    return (states_in_torch if kernels is None else kernels.table_states)(tables, view)


def states_in_torch(tables: TokenTables, view: RowView) -> Tensor:
    """The reference of ``table_states``; on CUDA it is one launch."""
    rows_B4, width = tables.rows_S4.index_select(0, view.slots_B), view.tokens_BW.shape[1]
    states_BW = rows_B4[:, STATE, None].repeat(1, width)
    for node in range(1, width):
        before_B = states_BW[:, node - 1]
        if view.tree is not None:
            before_B = states_BW.gather(1, view.tree.parents_BN[:, node, None])[:, 0]
        after_B = _next_states(tables, rows_B4, before_B, view.tokens_BW[:, node])
        states_BW[:, node] = torch.where(rows_B4[:, CLASSES] > 0, after_B.clamp(min=START), 0)
    forced_BF = tables.forced_SF.index_select(0, view.slots_B)[:, :width]
    forced_BW = torch.nn.functional.pad(forced_BF, (0, width - forced_BF.shape[1]))
    return torch.where(rows_B4[:, CLASSES, None] > 0, states_BW, forced_BW)


def forced_drafts(tables: TokenTables, rows_B: Tensor, drafts_BQ: Tensor) -> Tensor:
    """Draft tokens (int64) of slots ``rows_B``, those that are forced in place of the first ones."""
    forced_BF = tables.forced_SF.index_select(0, rows_B)[:, : drafts_BQ.shape[1]]
    count = forced_BF.shape[1]
    first_BF = torch.where(forced_BF > 0, forced_BF - 1, drafts_BQ[:, :count])
    return first_BF if count == drafts_BQ.shape[1] else torch.cat((first_BF, drafts_BQ[:, count:]), 1)


def advance_states_in_torch(tables: TokenTables, slots_B: Tensor, tokens_BW: Tensor, count_B: Tensor) -> None:
    """After the first ``count_B`` of ``tokens_BW`` (int64); only slot 0 may repeat."""
    rows_B4 = tables.rows_S4.index_select(0, slots_B)
    state_B = rows_B4[:, STATE]
    for index in range(tokens_BW.shape[1]):
        after_B = _next_states(tables, rows_B4, state_B, tokens_BW[:, index])
        state_B = torch.where((count_B > index) & (rows_B4[:, CLASSES] > 0), after_B, state_B)
    tables.rows_S4[:, STATE].index_copy_(0, slots_B, state_B)


def barred_in_torch(tables: TokenTables, slots_R: Tensor, states_R: Tensor | None, ids_V: Tensor) -> Tensor:
    """bool [R, V]: which of ``ids_V`` (int64) may not follow in ``states_R`` (None: those of the slots)."""
    pool, rows_R4 = tables.pool_PE.view(-1), tables.rows_S4.index_select(0, slots_R).to(torch.int64)
    if states_R is None:
        states_R = rows_R4[:, STATE]
    classes_RV = pool[rows_R4[:, BEGIN, None] + ids_V].to(torch.int64)
    states_RV = pool[(rows_R4[:, NEXT] + states_R * rows_R4[:, CLASSES])[:, None] + classes_RV]
    return (rows_R4[:, CLASSES, None] > 0) & (states_RV == SINK)


def bar(
    logits_RV: Tensor, tables: TokenTables, slots_R: Tensor, before: tuple[Tensor, Tensor] | None = None,
    vocab_start: int = 0, size: int = 0, ids_V: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Logits of a drafter, of its ids from ``vocab_start`` on, in place: -inf where the token may not follow.

    ``before``: the state of the place before (int32 [R]) and the draft token there (int64 [R]); None: the slots' states
    count. ``size``: draft ids that there are; ``ids_V``: the target's id (int64) of each, None: the same. Returns the
    state of this place, int32 [R]; of a row without a table any number."""
    kernels = kernels_for(logits_RV)
    how = bar_in_torch if kernels is None else kernels.bar
    return how(logits_RV, tables, slots_R, before, vocab_start, size, ids_V)


def bar_in_torch(
    logits_RV: Tensor, tables: TokenTables, slots_R: Tensor, before: tuple[Tensor, Tensor] | None, vocab_start: int,
    size: int, ids_V: Tensor | None,
) -> Tensor:  # fmt: skip
    """The reference of ``bar``; on CUDA it is one launch."""
    rows_R4 = tables.rows_S4.index_select(0, slots_R)
    states_R = rows_R4[:, STATE]
    if before is not None:
        after_R = _next_states(tables, rows_R4, *before).clamp(min=START)
        states_R = torch.where(rows_R4[:, CLASSES] > 0, after_R, 0)
    last = min(vocab_start + logits_RV.shape[1], size)
    drafts_V = torch.arange(vocab_start, max(vocab_start, last), device=logits_RV.device)
    barred_RV = barred_in_torch(tables, slots_R, states_R, drafts_V if ids_V is None else ids_V[drafts_V])
    logits_RV[:, : len(drafts_V)].masked_fill_(barred_RV, float("-inf"))
    return states_R
