"""Forward pass and tail of packed tokens: those of decode requests, then those of prefill chunks.

Knows: what a step with prefill chunks computes; every row that is due samples. Does not know: how prompts were cut,
where draft tokens come from (drafts.py), which parts are captured (packed_step.py).
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from models.inputs import DecodeAttention, MixedAttention, PrefillAttention, StateRows, StepInputs
from models.row_buckets import LARGE_STEP
from runtime.execute.launch_spec import GREEDY, MOST_PIECES
from runtime.execute.proposer import Observed
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.logprobs import StepPromptLogprobs
from runtime.execute.slot_state import NEWEST
from runtime.execute.staging import Chunks
from runtime.execute.step.commit import Committed, ProposerFeed
from runtime.execute.step.gather import Packed, Rows, gather_decode, gather_packed, pieces_of
from runtime.execute.step.memory import StepParts
from runtime.execute.step.tail import Tail
from runtime.schedule.plan import PADDING_SLOT, TRASH_BLOCK, StepPlan

_TOKENS_A_SAMPLE = 8  # from so many on, the last layer's queries and attention are worth separate launches


class Lengths(NamedTuple):
    """What the host knows of the rows of a packed step; all three as in PrefillAttention.

    ``query`` and ``kv`` (tokens of KV up to the chunk's end) are 0 for decode requests, whose tokens come first, and
    for forks, which come last and have none. All are 0 in a group that decodes while another has a chunk.
    """

    query: tuple[int, ...]
    kv: tuple[int, ...]
    first_token: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        decoding, forks = (0,) * plan.decode_rows, (0,) * len(plan.forks)
        query = tuple(len(chunk.token_ids) for chunk in plan.chunks)
        known = tuple(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)
        return cls(decoding + query + forks, decoding + known + forks, plan.decode_rows * plan.row_tokens)

    def attention(self, page_table_RP: Tensor) -> PrefillAttention:
        return PrefillAttention(page_table_RP, self.query, self.kv, first_token=self.first_token)


class DecodeTokens:
    """What decode requests bring to a packed step: one token each, without draft tokens."""

    name = "prefill"  # of the step
    width = 1  # W
    tokens = 1  # of a row, that go through the model
    proposes = False

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    def propose(self, rows: int, variant: SamplingVariant) -> None:
        """Propose draft tokens for the first ``rows`` rows of the step whose chunks are staged, of those that decode;
        ``variant`` samples the step."""

    def proposal_variant(self, variant: SamplingVariant) -> SamplingVariant:
        """What ``propose`` needs of the step's variant; steps with the same share a graph."""
        return GREEDY

    def gather(self, chunks: Chunks) -> Packed:
        """All tokens of the step, those of decode requests from their slots."""
        return gather_packed(self._parts.tables, chunks, self._parts.limits.block_size)

    def tree(self, slots_B: Tensor) -> Tensor | None:
        """DecodeAttention.tree_BQ of decode requests; of other rows anything."""
        return None

    def state_rows(self, chunks: Chunks, packed: Packed) -> StateRows:
        """Whose state each row continues; the forward pass updates it with all tokens."""
        return chunks.state_rows(packed.ghosts_R)

    def sampled(self, chunks: Chunks) -> Tensor:
        """int64 [X], row-major, ``tokens`` a row: the tokens in T after which a row may sample."""
        return chunks.logit_rows_R

    def finish(
        self, tail: Tail, hidden_XN: Tensor, emitting_R: Tensor, variant: SamplingVariant
    ) -> tuple[Rows, Committed]:
        """A token for every row that is not the padding slot's."""
        rows = gather_decode(self._parts.tables, emitting_R, self._parts.limits.block_size)
        return rows, tail.finish(hidden_XN, rows, 1, variant)


class PackedPass:
    """Both parts, of a step whose decode requests are as ``decode`` says."""

    def __init__(self, parts: StepParts, decode: DecodeTokens) -> None:
        self.decode = decode
        self._parts = parts
        self._tail = Tail(parts.model, parts.tables, parts.ring)
        self._feed = ProposerFeed(parts.proposer)

    @property
    def feature_size(self) -> int:
        """F: numbers that the proposer reads of a token's layers; 0 for none."""
        tap = self._feed.tap
        return 0 if tap is None else len(tap.layers) * self._parts.model.config.hidden_size

    def prefill(
        self, chunks: Chunks, lengths: Lengths, variant: SamplingVariant, scores: StepPromptLogprobs | None = None,
        exchange: int = 0, copied_2C: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Forward and tail; a chunk that is not its prompt's last samples nothing.

        ``scores`` receives the log-probabilities of ``chunks.scored_2S``; None for none. ``copied_2C``: see
        ``copy_forked``.
        """
        model = self._parts.model
        attention = lengths.attention(self._parts.tables.gather_groups(chunks.slots_R))
        scored_2S = None if scores is None else chunks.scored_2S
        every_token, mixed = scored_2S is not None, lengths.first_token > 0
        hidden, features_XF = self.hidden(chunks, attention, exchange, mixed=mixed, every_token=every_token)
        if scores is not None and scored_2S is not None:
            scores.fill(hidden, scored_2S, lambda h_RN: model.gather_logits(model.logits(h_RN)))
            hidden = hidden.index_select(0, chunks.logit_rows_R)
        if copied_2C is not None and copied_2C.shape[1]:
            self._parts.pool.copy_blocks(copied_2C)
        self.finish(hidden, features_XF, chunks.emitting_R, variant)

    def hidden(
        self, chunks: Chunks, attention: PrefillAttention, exchange: int = 0, *, mixed: bool = False,
        every_token: bool = False, split_keys: bool = False, captured: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The part of the step that depends on no row's sampling parameters: final hidden states of the X tokens after
        which a row may sample, [X, N], or of every token [T, N]; and what the proposer reads of their layers, [X, F].

        The proposer observes all tokens here whose successors are known.

        ``attention`` is of the chunks; its page table has at least R rows. ``mixed``: some rows may decode; which ones
        is read on the device. ``split_keys``: as in StepShape; then only the page table of ``attention`` is read.
        ``captured``: in a graph, whose kernels are compiled before the first request comes.
        """
        size, decode, feed = self._parts.limits.block_size, self.decode, self._feed
        packed, sampled_X = decode.gather(chunks), decode.sampled(chunks)
        could_decode = min(len(chunks.slots_R), len(chunks.slots_T) // decode.tokens)  # forks have no tokens
        table_RP = attention.page_table_BP[..., : len(chunks.slots_R), :]
        longest = table_RP.shape[-1] * size
        of_decode = DecodeAttention(
            table_RP[..., :could_decode, :], packed.kv_lengths_R[:could_decode], decode.tokens, longest,
            skip_empty=True, tree_BQ=decode.tree(chunks.slots_R[:could_decode]),
        )  # fmt: skip
        of_chunks: PrefillAttention | DecodeAttention = attention
        if split_keys:
            of_chunks = pieces_of(chunks, packed, table_RP, MOST_PIECES, longest)
        sampled_alone = captured and not (every_token or feed.on) and self._parts.model.last_layer_asks_alone
        inputs = StepInputs(
            token_ids_T=packed.token_ids_T,
            positions_T=packed.positions_T,
            kv_slots_T=packed.kv_slots_T,
            attention=MixedAttention(of_decode, of_chunks) if mixed or split_keys else of_chunks,
            logit_rows_R=None if every_token or feed.reads_hidden else sampled_X,
            last_attention=self._attention_of_sampled(chunks, packed, longest) if sampled_alone else None,
            state=decode.state_rows(chunks, packed) if self._parts.has_slot_state else None,
            exchange_rows=exchange or None,
        )
        hidden = self._parts.model.forward(inputs, self._parts.caches, feed.tap)
        if not feed.on:
            return hidden, None
        self._show_chunks(inputs, chunks, packed, hidden if feed.reads_hidden else None)
        features_TF = feed.features_TF
        features_XF = None if features_TF is None else features_TF.index_select(0, sampled_X)
        if feed.reads_hidden and not every_token:
            hidden = hidden.index_select(0, sampled_X)
        return hidden, features_XF

    def _show_chunks(self, inputs: StepInputs, chunks: Chunks, packed: Packed, hidden_TN: Tensor | None) -> None:
        """The proposer observes the tokens whose successors are known before this step samples: all but each row's
        newest. Decode requests, and the last tokens of last chunks, follow in the tail."""
        tables, slots_T = self._parts.tables, chunks.slots_T
        history_SL = tables.history_SL
        assert history_SL is not None  # an executor with a proposer keeps histories
        next_T = (packed.positions_T + 1).clamp(max=history_SL.shape[1] - 1)
        known_T = next_T < tables.columns.length[slots_T]
        kept_T = known_T & (slots_T != PADDING_SLOT) & (chunks.positions_T > NEWEST)
        next_ids_T = history_SL[slots_T, next_T].to(torch.int64)
        kept_kv_slots_T = torch.where(kept_T, packed.places_GT[0], TRASH_BLOCK)
        features_TF = self._feed.features_TF
        self._feed.observe(
            Observed(inputs.of_group(0), slots_T, next_ids_T, kept_T, kept_kv_slots_T, hidden_TN, features_TF)
        )

    def _attention_of_sampled(self, chunks: Chunks, packed: Packed, longest: int) -> DecodeAttention | None:
        """Attention of each row's last token alone; None if all tokens are too few for the extra launches, and for rows
        that may sample more than once.

        A row that samples nothing (a chunk before the last one, padding) sees one key: its result is not read.
        """
        tokens, rows = len(chunks.slots_T), len(chunks.logit_rows_R)
        if self.decode.tokens > 1 or tokens < max(LARGE_STEP, _TOKENS_A_SAMPLE * rows):
            return None
        table_RP = self._parts.tables.gather_groups(chunks.slots_T.index_select(0, chunks.logit_rows_R))
        lengths_R = packed.positions_T.index_select(0, chunks.logit_rows_R) + 1
        lengths_R = torch.where(chunks.emitting_R == PADDING_SLOT, 1, lengths_R).to(torch.int32)
        return DecodeAttention(table_RP, lengths_R, 1, longest)

    def finish(
        self, hidden_XN: Tensor, features_XF: Tensor | None, emitting_R: Tensor, variant: SamplingVariant
    ) -> None:
        """The tail: rows of slots ``emitting_R`` sample, and the proposer observes their newest tokens."""
        rows, committed = self.decode.finish(self._tail, hidden_XN, emitting_R, variant)
        if self._feed.on:
            inputs = rows.inputs(self._parts.limits.block_size)
            self._feed.show(inputs, rows, hidden_XN, features_XF, committed)
