"""Tables of grammars on the device: a row's mask and the state after its token, in the step, without the host.

Knows: where tables lie, a state by slot, the states of draft tokens. Does not know: what a table means (token_table.py
of runtime/grammar_tables), which requests have one (schedule/tables.py). Rows without one are masked by the host, in
logit_edits.py, whose processor comes before and hands over a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.kernels import kernels_for
from runtime.execute.slots.feature import RowView, SlotFeature
from runtime.grammar_tables.token_table import MOST_ENTRIES, SINK, START
from runtime.schedule.plan import Constrained, SlotWrite

BEGIN, NEXT, CLASSES, STATE = range(4)  # columns of ``rows_S4``


class TokenTables(NamedTuple):
    """``pool_PE`` int16: in each place the classes of all ids, then the next states by state and class. ``rows_S4``
    int32: of each slot where these two begin in the pool, the number of classes (0: no table), the state."""

    pool_PE: Tensor
    rows_S4: Tensor


class RowTables(NamedTuple):
    """What applies to R rows of logits: the tables, each row's slot (int64 [R]) and state (int32 [R])."""

    tables: TokenTables
    slots_R: Tensor
    states_R: Tensor

    def apply(self, logits_RV: Tensor, vocab_start: int, rows: SamplingInputs, variant: SamplingVariant) -> Tensor:
        """Perhaps in place: tokens that may not follow go to -inf; NaN and +inf still show as NaN."""
        kernels = kernels_for(logits_RV)
        return (mask_in_torch if kernels is None else kernels.mask_by_tables)(logits_RV, self, vocab_start)


class TokenTableFeature(SlotFeature[TokenTables]):
    """``placed``: the key of the table in each place; ``held``: the slots that have one, as staged."""

    name = "edits"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.placed: dict[int, bytes] = {}
        self.held: set[int] = set()

    def make(self, slots: int) -> TokenTables:
        places = 0 if self.grammars is None else self.grammars.places
        entries = self.vocab_size + (MOST_ENTRIES if places else 1)
        pool_PE = self.device.zeros(max(places, 1), entries + entries % 2, dtype=torch.int16)
        return TokenTables(pool_PE, self.device.zeros(slots, 4, dtype=torch.int32))

    def write(self, writes: Sequence[SlotWrite]) -> dict[str, npt.NDArray[Any]]:
        freed = self.held.intersection(write.slot for write in writes)
        self.held -= freed
        return {"tableless_T": np.array(sorted(freed))} if freed else {}

    def constrain(self, rows: Sequence[Constrained]) -> dict[str, npt.NDArray[Any]]:
        staged: dict[str, npt.NDArray[Any]] = {}
        numbers = []
        for row in rows:
            if row.place is None or self.grammars is None:
                continue
            table = self.grammars.tables[row.key]
            begin, state = row.place * self.need().pool_PE.shape[1], table.after(row.token_ids)
            numbers.append((row.slot, begin, begin + self.vocab_size, table.next_SK.shape[1], state))
            if self.placed.get(row.place) != row.key:
                self.placed[row.place] = row.key
                both = np.concatenate((table.class_V, table.next_SK.ravel()))
                staged[f"table_{row.place}"] = np.pad(both, (0, len(both) % 2)).view(np.int32)
        if numbers:
            self.held.update(slot for slot, *_ in numbers)
            staged["tabled_T5"] = np.array(numbers)
        return staged

    def load(self, staged: Mapping[str, Tensor]) -> None:
        tables = self.need()
        if "tableless_T" in staged:
            tables.rows_S4.index_fill_(0, staged["tableless_T"], 0)
        if "tabled_T5" in staged:
            slots_T, rows_T4 = staged["tabled_T5"][:, 0], staged["tabled_T5"][:, 1:]
            tables.rows_S4.index_copy_(0, slots_T, rows_T4.to(torch.int32))
            for place in range(len(tables.pool_PE)):
                if (words := staged.get(f"table_{place}")) is not None:
                    tables.pool_PE.view(torch.int32)[place, : len(words)].copy_(words)

    def processor(self, view: RowView) -> RowTables:
        tables, width = self.need(), view.tokens_BW.shape[1]
        if width == 1:
            return RowTables(tables, view.slots_B, tables.rows_S4[:, STATE].index_select(0, view.slots_B))
        kernels = kernels_for(tables.pool_PE)
        states_BW = (states_in_torch if kernels is None else kernels.table_states)(tables, view)
        return RowTables(tables, view.slots_B.repeat_interleave(width), states_BW.reshape(-1))

    def advance(self, slots_B: Tensor, tokens_B: Tensor, gained_B: Tensor) -> None:
        kernels = kernels_for(tokens_B)
        move = advance_in_torch if kernels is None else kernels.advance_tables
        move(self.need(), slots_B, tokens_B, gained_B)


def _next_states(tables: TokenTables, rows_B4: Tensor, states_B: Tensor, tokens_B: Tensor) -> Tensor:
    """After one token each (int64), int32; of a row without a table any number."""
    pool, rows_B4 = tables.pool_PE.view(-1), rows_B4.to(torch.int64)
    classes_B = pool.gather(0, rows_B4[:, BEGIN] + tokens_B.clamp(min=0))
    return pool.gather(0, rows_B4[:, NEXT] + states_B * rows_B4[:, CLASSES] + classes_B).to(torch.int32)


def states_in_torch(tables: TokenTables, view: RowView) -> Tensor:
    """The state at each of a row's W tokens, int32 [B, W]; on CUDA one launch. After a draft token that may not follow,
    or that ends the text, no sample counts: there it is the first state, which leaves something to sample."""
    rows_B4 = tables.rows_S4.index_select(0, view.slots_B)
    states_BW = rows_B4[:, STATE, None].repeat(1, view.tokens_BW.shape[1])
    for node in range(1, states_BW.shape[1]):
        before_B = states_BW[:, node - 1]
        if view.tree is not None:
            before_B = states_BW.gather(1, view.tree.parents_BN[:, node, None])[:, 0]
        after_B = _next_states(tables, rows_B4, before_B, view.tokens_BW[:, node])
        states_BW[:, node] = torch.where(rows_B4[:, CLASSES] > 0, after_B.clamp(min=START), 0)
    return states_BW


def advance_in_torch(tables: TokenTables, slots_B: Tensor, tokens_B: Tensor, gained_B: Tensor) -> None:
    """One sampled token a row (int64), where ``gained_B`` (bool); only slot 0 may repeat. On CUDA one launch."""
    rows_B4 = tables.rows_S4.index_select(0, slots_B)
    state_B = rows_B4[:, STATE]
    after_B = _next_states(tables, rows_B4, state_B, tokens_B)
    tables.rows_S4[:, STATE].index_copy_(
        0, slots_B, torch.where(gained_B & (rows_B4[:, CLASSES] > 0), after_B, state_B)
    )


def mask_in_torch(logits_RV: Tensor, rows: RowTables, vocab_start: int) -> Tensor:
    """Float32 logits of ids from ``vocab_start`` on. On CUDA one launch, in which rows without a table end at once."""
    tables, slots_R, states_R = rows
    pool, rows_R4 = tables.pool_PE.view(-1), tables.rows_S4.index_select(0, slots_R).to(torch.int64)
    ids_V = torch.arange(vocab_start, vocab_start + logits_RV.shape[1], device=logits_RV.device)
    classes_RV = pool[rows_R4[:, BEGIN, None] + ids_V].to(torch.int64)
    states_RV = pool[(rows_R4[:, NEXT] + states_R * rows_R4[:, CLASSES])[:, None] + classes_RV]
    barred_RV = (rows_R4[:, CLASSES, None] > 0) & (states_RV == SINK)
    return torch.where(barred_RV, logits_RV + float("-inf"), logits_RV)
