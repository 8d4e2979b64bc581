"""Edits of logits that name tokens: allowed_token_ids or what a grammar allows, logit_bias and bad_words, by slot.

Knows: the tables that hold them, and what they do to logits: ids that are not allowed go to -inf, then biases are
added, then the last token of a bad word goes to -inf if the tokens before it were just generated. Does not know: which
row has which slot, how arrays reach the device.

The tables are written when a request that uses them is admitted, and once more when another one gets its slot. Only the
device updates ``recent_SH`` and states of grammars' tables (token_tables.py), so a steady step needs nothing from the
host; but of a request whose grammar has no table, which is a row when all its tokens have landed, the host writes
before each step which tokens are forced (they are its draft tokens), and ``allowed_SW``, of the token after these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.execute.device.protocol import Device
from runtime.execute.sampling.draft_tree import generations
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.kernels import kernels_for
from runtime.execute.sampling.token_tables import (
    MOST_FORCED,
    TablePlaces,
    TokenTables,
    advance_states_in_torch,
    barred_in_torch,
    load_tables,
    table_states,
)
from runtime.execute.slots.feature import RowView, SlotFeature
from runtime.grammar import Matcher
from runtime.schedule.plan import Constrained, SlotWrite
from runtime.schedule.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS

HISTORY = MAX_BAD_WORD_TOKENS - 1  # generated tokens that a bad word may have to be compared with
NO_ID = -1  # fills unused places; no token has this id
WORD_BITS = 32
BIASES, BAD_WORDS, MASKED = range(3)  # columns of ``sizes``
BY_IDS, BY_GRAMMAR = 1, 2  # in MASKED: what ``allowed_SW`` is of; 0: nothing


class LogitEdits(NamedTuple):
    """Tables by slot; slot 0, of padding, edits nothing.

    ``sizes_S3`` int32: biases, bad words, and what ``allowed_SW`` is of (0: it does not count); what is beyond them is
    left over from others. ``bias_ids_SK`` int32 and ``biases_SK`` float32: different ids. ``bad_SMP`` int32: token ids
    of bad words, right-aligned, NO_ID before them. ``allowed_SW`` int32: bit i % 32 of word i / 32 is set where id i is
    allowed.
    ``recent_SH`` int32: the newest generated tokens, the newest last, NO_ID before the first. ``grammars``: tables.
    """

    sizes_S3: Tensor
    bias_ids_SK: Tensor
    biases_SK: Tensor
    bad_SMP: Tensor
    allowed_SW: Tensor
    recent_SH: Tensor
    grammars: TokenTables


class RowEdits(NamedTuple):
    """What applies to R rows of logits: the tables, each row's slot (int64 [R]), what was generated before its token
    (int32 [R, HISTORY], as ``recent_SH``) and the state of its grammar (int32 [R], as ``table_states``); None: the
    slot's, and no token is forced.
    ``in_place``: as SlotFeature.processor."""

    tables: LogitEdits
    slots_R: Tensor
    recent_RH: Tensor | None = None
    states_R: Tensor | None = None
    in_place: bool = False

    def apply(self, logits_RV: Tensor, vocab_start: int, rows: SamplingInputs, variant: SamplingVariant) -> Tensor:
        """In place where nothing is added to logits, whose dtype holds -inf."""
        return edit_logits(logits_RV, self, vocab_start, in_place=self.in_place and not variant.biases)


class EditFeature(SlotFeature[LogitEdits]):
    """``edited``: the slots of which the tables hold something, as the host has staged them. ``matchers``: by slot, of
    those with a grammar."""

    name = "edits"

    def __init__(self, device: Device, slots: int, vocab_size: int) -> None:
        super().__init__(device, slots, vocab_size)
        self.edited: set[int] = set()
        self.places = TablePlaces(vocab_size)
        self.matchers: dict[int, Matcher] = {}

    def make(self, slots: int) -> LogitEdits:
        zeros, int32 = self.device.zeros, torch.int32
        return LogitEdits(
            zeros(slots, 3, dtype=int32),
            zeros(slots, MAX_LOGIT_BIAS, dtype=int32),
            zeros(slots, MAX_LOGIT_BIAS, dtype=torch.float32),
            zeros(slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, dtype=int32),
            zeros(slots, mask_words(self.vocab_size), dtype=int32),
            zeros(slots, HISTORY, dtype=int32),
            self.places.make(self.device, slots, 0 if self.grammars is None else self.grammars.places),
        )

    def write(self, writes: Sequence[SlotWrite]) -> dict[str, npt.NDArray[Any]]:
        """Of slots that edit logits, or did before: only as much as there is."""
        untabled = self.places.write(writes)
        writes = [write for write in writes if write.sampling.edits_logits or write.slot in self.edited]
        if not writes:
            return untabled
        self.edited.difference_update(write.slot for write in writes)
        self.edited.update(write.slot for write in writes if write.sampling.edits_logits)
        each = [(write.slot, write.sampling) for write in writes]
        masked = [BY_GRAMMAR if s.grammar else BY_IDS if s.allowed_token_ids else 0 for _, s in each]
        sizes = [(len(s.logit_bias), len(s.bad_words_token_ids), by) for (_, s), by in zip(each, masked, strict=True)]
        for write in writes:
            self.matchers.pop(write.slot, None)
            if write.sampling.grammar and self.grammars is not None:
                answer = write.token_ids[write.prompt_length :]
                self.matchers[write.slot] = self.grammars.matcher(write.sampling, write.stop_token_ids, answer)
        recent_EH = np.full((len(writes), HISTORY), NO_ID, np.int32)
        for row, write in zip(recent_EH, writes, strict=True):
            generated = write.token_ids[max(write.prompt_length, len(write.token_ids) - HISTORY) :]
            if len(generated):
                row[-len(generated) :] = generated
        staged = {"edit_slots_E": np.array([slot for slot, _ in each]), "edit_sizes_E3": np.array(sizes, np.int32)}
        staged["recent_EH"] = recent_EH
        biases = [(slot * MAX_LOGIT_BIAS + i, *pair) for slot, s in each for i, pair in enumerate(s.logit_bias)]
        if biases:
            cells, ids, values = zip(*biases, strict=True)
            staged["bias_cells_F"], staged["bias_ids_F"] = np.array(cells), np.array(ids, np.int32)
            staged["biases_F"] = np.array(values, np.float32)
        words = [(slot * MAX_BAD_WORDS + i, w) for slot, s in each for i, w in enumerate(s.bad_words_token_ids)]
        if words:
            staged["bad_cells_G"] = np.array([cell for cell, _ in words])
            staged["bad_GP"] = np.full((len(words), MAX_BAD_WORD_TOKENS), NO_ID, np.int32)
            for ids_P, (_, word) in zip(staged["bad_GP"], words, strict=True):
                ids_P[-len(word) :] = word
        by_ids = [(slot, list(s.allowed_token_ids)) for slot, s in each if s.allowed_token_ids and not s.grammar]
        if by_ids:
            bits_MV = np.zeros((len(by_ids), mask_words(self.vocab_size) * WORD_BITS), np.bool_)
            for bits_V, (_, allowed) in zip(bits_MV, by_ids, strict=True):
                bits_V[allowed] = True
            staged["masked_M"] = np.array([slot for slot, _ in by_ids])
            staged["allowed_MW"] = np.packbits(bits_MV, axis=1, bitorder="little").view(np.int32)
        return staged | untabled

    def constrain(self, rows: Sequence[Constrained]) -> dict[str, npt.NDArray[Any]]:
        staged: dict[str, npt.NDArray[Any]] = {}
        tabled = [row for row in rows if row.place is not None]
        if tabled:
            assert self.grammars is not None  # which give out places
            for row in tabled:
                self.matchers.pop(row.slot, None)
            staged = self.places.constrain(tabled, self.grammars.tables, self.need().grammars.pool_PE.shape[1])
            staged["unmasked_T"] = np.array([row.slot for row in tabled])
        rows = [row for row in rows if row.place is None]
        if not rows:
            return staged
        allowed_GW = np.zeros((len(rows), mask_words(self.vocab_size)), np.int32)  # no matcher: nothing is allowed
        forced_GF = np.zeros((len(rows), MOST_FORCED), np.int32)
        matchers = [self.matchers.get(row.slot) for row in rows]
        for matcher, row in zip(matchers, rows, strict=True):
            if matcher is not None:
                matcher.accept(row.token_ids)
        if self.grammars is not None:
            runs = self.grammars.allow(matchers, allowed_GW, [min(row.most - 1, MOST_FORCED) for row in rows])
            for forced_F, run in zip(forced_GF, runs, strict=True):
                forced_F[: len(run)] = [1 + token for token in run]
        slots_G = np.array([row.slot for row in rows])
        return staged | {"constrained_G": slots_G, "allowed_GW": allowed_GW, "forced_GF": forced_GF}

    def load(self, staged: Mapping[str, Tensor]) -> None:
        tables = self.need()
        for table, index, values in (
            (tables.sizes_S3, "edit_slots_E", "edit_sizes_E3"),
            (tables.recent_SH, "edit_slots_E", "recent_EH"),
            (tables.bias_ids_SK.view(-1), "bias_cells_F", "bias_ids_F"),
            (tables.biases_SK.view(-1), "bias_cells_F", "biases_F"),
            (tables.bad_SMP.flatten(0, 1), "bad_cells_G", "bad_GP"),
            (tables.allowed_SW, "masked_M", "allowed_MW"),
            (tables.allowed_SW, "constrained_G", "allowed_GW"),
        ):
            if index in staged:
                table.index_copy_(0, staged[index], staged[values])
        forced_SF = tables.grammars.forced_SF
        if "edit_slots_E" in staged:
            forced_SF.index_fill_(0, staged["edit_slots_E"], 0)
        if "constrained_G" in staged:
            forced_SF.index_copy_(0, staged["constrained_G"], staged["forced_GF"])
        if "unmasked_T" in staged:
            tables.sizes_S3[:, MASKED].index_fill_(0, staged["unmasked_T"], 0)
            forced_SF.index_fill_(0, staged["unmasked_T"], 0)
        load_tables(tables.grammars, staged)

    def processor(self, view: RowView, in_place: bool) -> RowEdits:
        return edits_of(self.need(), view)._replace(in_place=in_place)

    def most_tokens(self, view: RowView) -> Tensor:
        """Of a request whose grammar the host reads: the tokens that are forced, and one by the mask after them."""
        tables, slots_B = self.need(), view.slots_B
        masked_B = tables.sizes_S3[:, MASKED].index_select(0, slots_B)
        forced_B = (tables.grammars.forced_SF > 0).index_select(0, slots_B).sum(1)
        return torch.where(masked_B == BY_GRAMMAR, 1 + forced_B, view.width).to(torch.int32)

    def advance(self, slots_B: Tensor, tokens_BW: Tensor, count_B: Tensor) -> None:
        kernels = kernels_for(tokens_BW)
        (advance_in_torch if kernels is None else kernels.advance_edits)(self.need(), slots_B, tokens_BW, count_B)


def mask_words(vocab_size: int) -> int:
    """Words of ``allowed_SW`` for so many ids."""
    return -(-vocab_size // WORD_BITS)


def edits_of(tables: LogitEdits, view: RowView) -> RowEdits:
    """Of each sample, B * W rows: it comes after the draft tokens before it, or the nodes above it and its own."""
    slots_B, tokens_BW, tree, _ = view
    count, width = tokens_BW.shape
    if width == 1:
        return RowEdits(tables, slots_B)
    recent_BH, states_R = tables.recent_SH.index_select(0, slots_B), table_states(tables.grammars, view).view(-1)
    if tree is None:
        recent_BWH = torch.cat((recent_BH, tokens_BW[:, 1:].to(torch.int32)), dim=1).unfold(1, HISTORY, 1)
    else:
        newest_first = []
        for age, node_BN in enumerate(generations(tree.parents_BN, HISTORY)):
            older_BN = (HISTORY - 1 - age + tree.depth_BN).clamp(max=HISTORY - 1)  # of the row, if the path is shorter
            found_BN = torch.where(tree.depth_BN > age, tokens_BW.gather(1, node_BN), recent_BH.gather(1, older_BN))
            newest_first.append(found_BN.to(torch.int32))
        recent_BWH = torch.stack(newest_first[::-1], 2)
    recent_RH = recent_BWH.reshape(count * width, HISTORY)
    return RowEdits(tables, slots_B.repeat_interleave(width), recent_RH, states_R)


def advance_in_torch(tables: LogitEdits, slots_B: Tensor, tokens_BW: Tensor, count_B: Tensor) -> None:
    """Newest tokens and states after the first ``count_B`` of ``tokens_BW`` (int64); only slot 0 may repeat. On CUDA
    one launch."""
    known_BX = torch.cat((tables.recent_SH.index_select(0, slots_B), tokens_BW.to(torch.int32)), dim=1)
    newest_BH = count_B.to(torch.int64)[:, None] + torch.arange(HISTORY, device=known_BX.device)
    tables.recent_SH.index_copy_(0, slots_B, known_BX.gather(1, newest_BH))
    advance_states_in_torch(tables.grammars, slots_B, tokens_BW, count_B)


def edit_logits(logits_RV: Tensor, edits: RowEdits, vocab_start: int = 0, *, in_place: bool = False) -> Tensor:
    """Edited float32 copy of the logits of ids from ``vocab_start`` on; NaN and +inf still show as NaN.

    Rows whose slot edits nothing come out as they went in. ``in_place``: no row has biases, and the logits may be
    edited where they are, in their own dtype.
    """
    kernels = kernels_for(logits_RV)
    if kernels is None:
        return edit_logits_in_torch(logits_RV, edits, vocab_start)
    return kernels.edit_logits(logits_RV, edits, vocab_start, in_place=in_place)


def edit_logits_in_torch(logits_RV: Tensor, edits: RowEdits, vocab_start: int = 0) -> Tensor:
    """The reference of ``edit_logits``, always a copy; on CUDA it is one launch."""
    tables, slots_R = edits.tables, edits.slots_R
    vocab = logits_RV.shape[1]
    edited_RV = logits_RV.to(torch.float32)
    sizes_R3 = tables.sizes_S3.index_select(0, slots_R)
    ids_V = torch.arange(vocab_start, vocab_start + vocab, device=logits_RV.device)
    words_RV = tables.allowed_SW.index_select(0, slots_R).index_select(1, ids_V // WORD_BITS)
    barred_RV = (words_RV >> (ids_V % WORD_BITS)) & 1 == 0
    if edits.states_R is not None:  # of these rows none has a table
        forced_R1 = edits.states_R[:, None]
        barred_RV = torch.where(forced_R1 > 0, ids_V != forced_R1 - 1, barred_RV)
    barred_RV &= sizes_R3[:, MASKED, None] > 0
    barred_RV |= barred_in_torch(tables.grammars, slots_R, edits.states_R, ids_V)
    edited_RV = torch.where(barred_RV, edited_RV + float("-inf"), edited_RV)
    edited_RX = torch.nn.functional.pad(edited_RV, (0, 1))  # a last column for what is not to be written
    ids_RK = tables.bias_ids_SK.index_select(0, slots_R)
    used_RK = torch.arange(MAX_LOGIT_BIAS, device=ids_RK.device) < sizes_R3[:, BIASES, None]
    biases_RK = tables.biases_SK.index_select(0, slots_R)
    edited_RX = edited_RX.scatter_add(1, _columns(ids_RK, used_RK, vocab_start, vocab), biases_RK)
    bad_RMP = tables.bad_SMP.index_select(0, slots_R)
    before_RMH = bad_RMP[:, :, :-1]
    recent_RH = tables.recent_SH.index_select(0, slots_R) if edits.recent_RH is None else edits.recent_RH
    follows_RM = ((before_RMH == recent_RH[:, None]) | (before_RMH == NO_ID)).all(dim=2)
    used_RM = torch.arange(MAX_BAD_WORDS, device=ids_RK.device) < sizes_R3[:, BAD_WORDS, None]
    columns_RM = _columns(bad_RMP[:, :, -1], used_RM & follows_RM, vocab_start, vocab)
    bans_RM = torch.full(columns_RM.shape, float("-inf"), device=edited_RX.device)
    return edited_RX.scatter_add(1, columns_RM, bans_RM)[:, :vocab]


def _columns(ids: Tensor, used: Tensor, vocab_start: int, vocab: int) -> Tensor:
    """The column of each id (int64); the one past the last for what is not used or not in this share."""
    column = ids.to(torch.int64) - vocab_start
    return torch.where(used & (column >= 0) & (column < vocab), column, vocab)
