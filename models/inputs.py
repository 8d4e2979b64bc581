"""StepInputs: everything a forward pass needs besides the weights. There is no global context.

Knows: the tensors of one step and their shapes. Shape letters: T tokens of the step, B rows, P pages a row,
R rows that need logits, H query heads, K key/value heads, D head_dim, S page size.
Does not know: requests, slots or schedules; who filled the tensors (runtime/execute).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PIECE = 16  # tokens of a chunk that attend as one row where keys are split
MOST_TREE_TOKENS = 33  # of a tree, its root included: 32 bits say which of the others a token sees


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Every row has ``query_len`` new tokens (T = B * query_len) and its lengths live on the device.

    With ``starts_B`` and ``queries_B`` rows have different numbers of them, up to ``query_len``.

    page_table_BP int32: physical page of each logical page; entries past a row's length are any valid page.
    kv_lengths_B int32: tokens of KV to attend to, the new ones included.
    max_kv_length: the host's bound for a row (the page table covers it); never read from the device.
    skip_empty: a row of length 0 is none of decode's: its tokens are left as they are in an output that was given
    (Ops.decode_attention); else what attention returns for such a row is finite and otherwise undefined.
    starts_B, queries_B int32, on the device: row i's new tokens are T's [starts_B[i], starts_B[i] + queries_B[i]); both
    or neither. Then attention has as many tokens as q; those of no row are undefined.
    causal: False where a new token sees all new tokens of its row, later ones, too (a drafter's block). With
    neither ``starts_B`` nor ``tree_BQ``.
    tree_BQ int32 [B, query_len], on the device: the new tokens are the nodes of a tree, its root first and parents
    before children, in that order in the cache. A token sees all before the root, the root, and node n (1 to 32) where
    bit n - 1 of its number is set: its ancestors and itself. None: a chain, each token sees those before it. Not
    together with ``starts_B``.
    work: made of the lengths by Ops.plan_decode once a step and used by all layers (an object of the backend's own,
    None where it has none).
    """

    page_table_BP: Tensor
    kv_lengths_B: Tensor
    query_len: int
    max_kv_length: int
    skip_empty: bool = False
    starts_B: Tensor | None = None
    queries_B: Tensor | None = None
    causal: bool = True
    tree_BQ: Tensor | None = None
    work: object | None = None


def seen_keys(inputs: DecodeAttention, positions_L: Tensor, window: int | None = None) -> Tensor:
    """bool [B, query_len, L]: whether each new token sees the keys at places ``positions_L`` (int64) of its row.

    ``window``: only the last so many positions up to its own. A tree's node is at its depth below the root.
    Of rows with fewer tokens than ``query_len``, which are not live, the first key is seen at least.
    """
    new = inputs.query_len
    if not inputs.causal:
        known_BL = (positions_L < inputs.kv_lengths_B[:, None]) | (positions_L == 0)
        return known_BL[:, None].expand(-1, new, -1)
    first_B11 = (inputs.kv_lengths_B.to(torch.int64) - new)[:, None, None]  # where the first new token is
    if inputs.tree_BQ is None:
        last_BQ1 = (first_B11 + torch.arange(new, device=positions_L.device)[:, None]).clamp(min=0)
        seen_BQL = positions_L <= last_BQ1
        return seen_BQL if window is None else seen_BQL & (positions_L > last_BQ1 - window)
    node_B1L = positions_L - first_B11
    bits_BQL = inputs.tree_BQ.to(torch.int64)[:, :, None] >> (node_B1L - 1).clamp(0, MOST_TREE_TOKENS - 2)
    seen_BQL = (node_B1L <= 0) | (positions_L == 0) | ((node_B1L < new) & (bits_BQL & 1 == 1))
    if window is None:
        return seen_BQL
    depth_BQ = nodes_of_paths(inputs.tree_BQ)[1] - 1
    deep_BL = depth_BQ.gather(1, node_B1L[:, 0].clamp(0, new - 1))
    at_BL = torch.where(node_B1L[:, 0] > 0, first_B11[:, 0] + deep_BL, positions_L)
    last_BQ1 = (first_B11 + depth_BQ[:, :, None]).clamp(min=0)
    return seen_BQL & (at_BL[:, None] > last_BQ1 - window)


def nodes_of_paths(seen_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(path, length) of each node of trees by ``tree_BQ``: path int64 [B, N, N], the nodes from the root down to it and
    then N; length int64 [B, N]."""
    nodes = seen_BN.shape[1]
    number_N = torch.arange(nodes, device=seen_BN.device)
    bits_BNN = seen_BN.to(torch.int64)[:, :, None] >> (number_N - 1).clamp(min=0) & 1
    on_path_BNN = (bits_BNN == 1) | (number_N == 0)
    path_BNN = torch.where(on_path_BNN, number_N, nodes).sort(-1).values  # parents come before children
    return path_BNN, on_path_BNN.sum(-1)


class PlanTable(Protocol):
    """Plans of prefill attention that are plain tables, which launches read where ``place`` is."""

    @property
    def place(self) -> Tensor:
        """int32 [E, 4] on the device; always the same tensor."""
        ...

    def entries(
        self, query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], first_token: int, tokens: int
    ) -> npt.NDArray[np.int32]:
        """int32 [X, 4], contiguous: a plan, as launches over ``tokens`` read it from the beginning of ``place``,
        whatever follows. X is at most E, and at most ``tokens``. Host work alone.

        The rest as in PrefillAttention. ValueError for more rows or tokens than there is room for.
        """
        ...


class RepeatedPrefill(Protocol):
    """Prefill attention that captured launches read, and that the host plans anew before each of their replays."""

    @property
    def table(self) -> PlanTable | None:
        """There where a plan is a plain table, which may come to its place with whatever else a step changes; None
        where the backend alone can bring it."""
        ...

    def plan(self, query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], first_token: int = 0) -> None:
        """Enqueue what the next replay reads, on the current stream, after the replays before it; no host sync.

        Where there is a ``table``, for start-up alone: it makes another copy.
        Arguments as in PrefillAttention, at most as many rows as the page table has and as many tokens as agreed on.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Rows with different numbers of new tokens, packed; all lengths are known on the host.

    query_lengths[i] new tokens of row i, the last of its kv_lengths[i] tokens (prefix hits and earlier chunks come
    before); both may be 0. The first row's begin at ``first_token``. page_table_BP as in DecodeAttention. ``planned``
    is filled by the attention backend once a step and reused by all layers (an object of the backend's own, None for
    the reference kernels). Where it is a RepeatedPrefill, lengths and first token are those of its last plan. What
    attention returns for tokens of no row is undefined.
    """

    page_table_BP: Tensor
    query_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    planned: object | None = None
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """Decode rows, ``query_len`` tokens each, before prefill rows; how many of each the device alone knows.

    ``decode``: of the first rows, as many as could decode, with kv_lengths_B 0 for those that do not; row i's tokens
    begin at i * query_len. ``prefill``: of all rows, none of whose tokens decode; its page table may have more rows
    than ``decode``. Or, of a few short chunks after long prefixes, their pieces of at most PIECE tokens, each a row
    with ``starts_B``: keys are split between programs then, which prefill attention does not do.
    The new keys and values of all rows are written before any row attends: rows may share pages.
    """

    decode: DecodeAttention
    prefill: PrefillAttention | DecodeAttention


@dataclass(frozen=True, slots=True)
class StateTree:
    """Every row's new tokens are the N nodes of a tree, its root first and parents before children; N is at most
    MOST_TREE_TOKENS.

    parents_BN int64: each node's parent, by its number in the row; the root's is 0. seen_BN int32: what
    DecodeAttention.tree_BQ says of the same tree. Both on the device.
    """

    parents_BN: Tensor
    seen_BN: Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """Whose state each row continues, for layers that keep one of a fixed size (SlotState).

    slots_B int64: the row of the banks that row i reads before its new tokens and writes after them. A row that is not
    live (a ghost, padding) has 0, the null slot, which any number of rows may share: its contents mean nothing.
    ends_B int64: row i's new tokens are T's [ends_B[i - 1], ends_B[i]), from 0 for the first; possibly none, and those
    past the last end are padding, of which a mixer may return anything. None where every row has as many, T / B.

    undecided: there if it is decided after the forward pass how many of a row's new tokens are kept (speculation).
    A mixer then leaves state as it is, and hands an Undecided to the decider, which need not keep all of it. What
    mixers give to kernels has one of the other two instead. frozen: state is read, never written. kept_B: of each row's
    new tokens only so many count (any int; possibly none). These update the state, and what is returned is not read.

    writes_B int64, with ``ends_B``: there where only some rows are undecided, windows of ``window`` tokens at most: the
    row of the banks that row i writes, which is 0 for those rows and that of slots_B for the others. None: slots_B.

    tree: there where new tokens are a tree, with ``frozen`` or ``kept_B`` and without ``ends_B``. A node then follows
    its parent, not the token before it. path_BW int64, with ``kept_B``: those that count are nodes path_BW[i, 0],
    path_BW[i, 1], ..., each the parent of the next one, from the root on; W at most. Nothing of other nodes reaches a
    node that is not their descendant, NaN or not.
    """

    slots_B: Tensor
    ends_B: Tensor | None = None
    undecided: Callable[[Undecided], None] | None = None
    frozen: bool = False
    kept_B: Tensor | None = None
    tree: StateTree | None = None
    path_BW: Tensor | None = None
    writes_B: Tensor | None = None
    window: int = 0

    @property
    def written_B(self) -> Tensor:
        """int64: the row of the banks that each row writes."""
        return self.slots_B if self.writes_B is None else self.writes_B

    @property
    def replays(self) -> bool:
        """Whether tokens update the state whose results were read before: what is returned now is not read."""
        return self.kept_B is not None and not self.frozen

    def real(self, tokens: int) -> Tensor:
        """bool [T]: which of the step's ``tokens`` belong to live rows, not to padding."""
        tokens_T = torch.arange(tokens, device=self.slots_B.device)
        rows_T = tokens_T * len(self.slots_B) // tokens
        if self.ends_B is not None:
            rows_T = torch.searchsorted(self.ends_B, tokens_T, right=True)
        return torch.nn.functional.pad(self.slots_B, (0, 1))[rows_T] != 0  # padding comes after the last row

    @property
    def verifying(self) -> StateRows:
        """For kernels, while some rows are undecided: these leave state as it is."""
        return replace(self, undecided=None, frozen=self.writes_B is None)


@dataclass(frozen=True, slots=True)
class Undecided:
    """What a layer made of a step's new tokens [T, X], of which its state is still to take some in.

    ``advance(made_TX, rows, positions_T)`` applies the tokens that ``rows`` says, with ``kept_B``; ``layer``: whose.
    """

    layer: object
    made_TX: Tensor
    advance: Callable[[Tensor, StateRows, Tensor], object]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """token_ids_T int64; positions_T int64; kv_slots_T int64: page * S + offset where each token's KV is written
    (page 0 is the trash page: masked rows point into it). Where layers have windows, kv_slots_T and every page table
    have a leading dim of groups, and a layer is given what ``of_group`` returns. logit_rows_R int64: the tokens, as
    indices into T, whose hidden states are wanted; None means all. real_T bool: tokens that are not masked; a decoder
    with experts derives it from kv_slots_T where it is None. state: there where a layer has slot state. exchange_rows:
    rows that every group brings to each exchange where groups share experts, at least T; None means T. last_attention:
    of the tokens ``logit_rows_R`` alone, a row each with one new token, which sees what it sees in ``attention``: so
    few tokens attend in the last layer, since no output needs the others. None: all of them do.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    attention: DecodeAttention | PrefillAttention | MixedAttention
    logit_rows_R: Tensor | None = None
    real_T: Tensor | None = None
    state: StateRows | None = None
    exchange_rows: int | None = None
    last_attention: DecodeAttention | None = None

    def of_group(self, number: int) -> StepInputs:
        """With the page tables and KV places of one group of layers: 0 of those that attend to all tokens, n of the
        n-th window, in ascending order. The same where all layers are of one group."""
        if self.kv_slots_T.dim() == 1:
            return self
        attention, last = self.attention, self.last_attention
        if isinstance(attention, MixedAttention):
            attention = MixedAttention(_of_group(attention.decode, number), _of_group(attention.prefill, number))
        else:
            attention = _of_group(attention, number)
        last = None if last is None else _of_group(last, number)
        return replace(self, kv_slots_T=self.kv_slots_T[number], attention=attention, last_attention=last)


_Attention = TypeVar("_Attention", DecodeAttention, PrefillAttention, DecodeAttention | PrefillAttention)


def _of_group(attention: _Attention, number: int) -> _Attention:
    return replace(attention, page_table_BP=attention.page_table_BP[number])
