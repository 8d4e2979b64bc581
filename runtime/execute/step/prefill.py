"""The prefill role: chunks of prompts, packed, behind rows that decode; every row that is due draws one token.

Knows: what a step with chunks computes, and that it is replayed from graphs where there are some (prefill_graphs.py)
and launched kernel by kernel elsewhere. Does not know: how prompts were cut, windows beside chunks (mixed_window.py),
other roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models.inputs import (
    DecodeAttention,
    MixedAttention,
    PrefillAttention,
    RepeatedPrefill,
    StateRows,
    StepInputs,
)
from models.row_buckets import LARGE_STEP
from runtime.execute.launch_spec import GREEDY, MOST_PIECES, LaunchSpec
from runtime.execute.role import RoleParts, Trial
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.prompt_logprobs import StepPromptLogprobs
from runtime.execute.staging import Chunks
from runtime.execute.step.prefill_graphs import Lengths, PrefillGraphs
from runtime.execute.step.proposer_feed import ProposerFeed
from runtime.execute.step.step_io import Packed, gather_decode, gather_packed, pieces_of
from runtime.execute.step.tail import Tail
from runtime.schedule.config import StepLimits
from runtime.schedule.plan import PADDING_SLOT, StepKind, StepPlan

_TOKENS_A_DRAW = 8  # from so many on, the last layer's queries and attention are worth launches of their own


class PrefillRole:
    """Serves plans with chunks whose rows that decode have one token each."""

    name = "prefill"
    width = 1  # W of rows that decode beside chunks
    row_tokens = 1  # of such a row, that go through the model
    proposes = False  # whether tokens of these rows are guessed before the forward pass

    def __init__(self, parts: RoleParts) -> None:
        self._parts = parts
        self._tail = Tail(parts.model, parts.tables, parts.ring)
        self._feed = ProposerFeed(parts)
        self.graphs = PrefillGraphs(parts, self)

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        return kind is not StepKind.DECODE and plan.width == self.width

    def rehearse(self) -> None:
        """The largest step that a plan can ask for."""
        self._rehearse(self._parts.limits.max_prefill_tokens)

    def compile_shorter(self) -> None:
        """Run smaller steps, too, so that no request waits for a compiler; on a CPU nothing is compiled."""
        if self._parts.device.torch_device.type != "cpu":
            with self._parts.model.few_layers():
                for tokens in shorter_prefills(self._parts.limits.max_prefill_tokens):
                    self._rehearse(tokens)

    def warm_up(self) -> None:
        self.graphs.warm_up()

    def trials(self, bucket: int, variant: SamplingVariant) -> Sequence[Trial]:
        return self.graphs.trials(bucket, variant)

    def launch(self, spec: LaunchSpec, scores: StepPromptLogprobs | None) -> None:
        kernels = self._parts.model.kernels
        if kernels.slower_prefill is not None:
            self._parts.fallbacks.take(f"{kernels.prefill_name}_prefill", kernels.slower_prefill)
        if spec.captured:
            self.graphs.launch(spec)
        else:
            self._count_fallback(spec)
            chunks, lengths = self._parts.staging.chunks(spec), Lengths.of(spec.plan)
            self._parts.device.compute.submit(lambda: self._launch_eagerly(spec, chunks, lengths, scores))

    def _launch_eagerly(
        self, spec: LaunchSpec, chunks: Chunks, lengths: Lengths, scores: StepPromptLogprobs | None
    ) -> None:
        if spec.shape.proposing:
            self.propose(spec.shape.proposing, spec.shape.variant)
        copied_2C = self._parts.staging.copied_blocks(spec)
        self.prefill(chunks, lengths, spec.shape.variant, scores, spec.shape.exchange, copied_2C)

    def copy_forked(self, spec: LaunchSpec) -> None:
        """Between forward pass and tail: the blocks in whose middle prompts end, for answers that fork.

        The tail shows the proposer what each answer drew, of which it may write entries into these blocks.
        """
        if (copied_2C := self._parts.staging.copied_blocks(spec)).shape[1]:
            self._parts.device.compute.submit(lambda: self._parts.pool.copy_blocks(copied_2C))

    def propose(self, rows: int, variant: SamplingVariant) -> None:
        """Guess what follows the newest tokens of the first ``rows`` rows whose chunks are staged, of those that
        decode; the step that this is for, served by ``variant``, comes next. Nothing here: they have one token each."""

    def guessed_by(self, variant: SamplingVariant) -> SamplingVariant:
        """What guesses for a step served by ``variant`` need of it; steps with the same share a graph of guesses."""
        return GREEDY

    def _count_fallback(self, spec: LaunchSpec) -> None:
        """A prefill that is launched kernel by kernel although it was to be replayed; each reason has its own name."""
        if not self._parts.config.prefill_buckets:
            return
        if not self.graphs.buckets:
            name = "eager_prefill_attention"
            reason = f"attention of {self._parts.model.kernels.prefill_name} cannot be captured on every rank"
        elif spec.plan.scored_tokens:
            name = "eager_prefill_scored"
            reason = "log-probabilities of prompt tokens need the last layer of every token"
        else:
            name = "eager_prefill_beyond_buckets"
            tokens, largest = spec.plan.packed_tokens, self.graphs.buckets[-1]
            here = "" if tokens > largest else ", and more in another group that decodes meanwhile"
            reason = f"{tokens} tokens{here}; the largest captured prefill has {largest}"
        self._parts.fallbacks.take(name, reason)

    # ---- what a step computes ----

    def prefill(
        self,
        chunks: Chunks,
        lengths: Lengths,
        variant: SamplingVariant,
        scores: StepPromptLogprobs | None = None,
        exchange_rows: int = 0,
        copied_2C: Tensor | None = None,
    ) -> None:
        """Rows that decode, and chunks of prompts; a chunk that is not its prompt's last yields nothing.

        ``scores`` receives the log-probabilities of ``chunks.scored_2S``; None when there are none. ``copied_2C``: see
        ``copy_forked``.
        """
        model = self._parts.model
        attention = lengths.attention(self._parts.tables.gather_blocks(chunks.slots_R))
        scored_2S = None if scores is None else chunks.scored_2S
        every_token, mixed = scored_2S is not None, lengths.first_token > 0
        hidden, features_RF = self.hidden(chunks, attention, exchange_rows, mixed=mixed, every_token=every_token)
        if scores is not None and scored_2S is not None:
            scores.fill(hidden, scored_2S, lambda h_RN: model.gather_logits(model.logits(h_RN)))
            hidden = hidden.index_select(0, chunks.logit_rows_R)
        if copied_2C is not None and copied_2C.shape[1]:
            self._parts.pool.copy_blocks(copied_2C)
        self.finish(hidden, features_RF, chunks.emitting_R, variant)

    def hidden(
        self,
        chunks: Chunks,
        attention: PrefillAttention,
        exchange_rows: int = 0,
        *,
        mixed: bool = False,
        every_token: bool = False,
        split_keys: bool = False,
        captured: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The part of the step that depends on no row's parameters: final hidden states of the X tokens that draw
        (``drawing``), [X, N], or of every token [T, N]; and what the proposer reads of layers, [X, F].

        The proposer is shown all tokens here but those whose successors are still to be drawn.

        ``attention`` is of the chunks; its page table has at least R rows. ``mixed``: some rows may decode; which ones
        is read on the device. ``split_keys``: as in LaunchSpec; then only the page table of ``attention`` is read.
        ``captured``: in a graph, whose kernels are compiled before the first request comes.
        """
        size = self._parts.limits.block_size
        packed, drawing_X = self.gather(chunks), self.drawing(chunks)
        could_decode = min(len(chunks.slots_R), len(chunks.slots_T) // self.row_tokens)  # forks have no tokens
        table_RP = attention.page_table_BP[: len(chunks.slots_R)]
        longest = table_RP.shape[1] * size
        decode = DecodeAttention(
            table_RP[:could_decode],
            packed.kv_lengths_R[:could_decode],
            self.row_tokens,
            longest,
            skip_empty=True,
            tree_BQ=self.tree(chunks.slots_R[:could_decode]),
        )
        of_chunks: PrefillAttention | DecodeAttention = attention
        if split_keys:
            of_chunks = pieces_of(chunks, packed, table_RP, MOST_PIECES).attention(longest)
        drawing_alone = captured and not (every_token or self._feed.on) and self._parts.model.last_layer_asks_alone
        inputs = StepInputs(
            token_ids_T=packed.token_ids_T,
            positions_T=packed.positions_T,
            kv_slots_T=packed.kv_slots_T,
            attention=MixedAttention(decode, of_chunks) if mixed or split_keys else of_chunks,
            logit_rows_R=None if every_token or self._feed.reads_hidden else drawing_X,
            last_attention=self._attention_of_drawing(chunks, packed, longest) if drawing_alone else None,
            state=self.state_rows(chunks, packed) if self._parts.has_slot_state else None,
            exchange_rows=exchange_rows or None,
        )
        feed = self._feed
        hidden = self._parts.model.forward(inputs, self._parts.caches, feed.tap)
        if not feed.on:
            return hidden, None
        feed.show_chunks(inputs, chunks, packed, hidden if feed.reads_hidden else None)
        features_TF = feed.features_TF
        features_XF = None if features_TF is None else features_TF.index_select(0, drawing_X)
        if feed.reads_hidden and not every_token:
            hidden = hidden.index_select(0, drawing_X)
        return hidden, features_XF

    def gather(self, chunks: Chunks) -> Packed:
        """The step's tokens, those of rows that decode from their slots."""
        return gather_packed(self._parts.tables, chunks, self._parts.limits.block_size)

    def tree(self, slots_B: Tensor) -> Tensor | None:
        """DecodeAttention.tree_BQ of rows that decode; of others anything."""
        return None

    def state_rows(self, chunks: Chunks, packed: Packed) -> StateRows:
        """Whose state each row continues; all of them take their tokens in."""
        return chunks.state_rows(packed.ghosts_R)

    def drawing(self, chunks: Chunks) -> Tensor:
        """int64 [X], row-major, ``row_tokens`` a row: where in T the tokens are behind which a row may draw."""
        return chunks.logit_rows_R

    def _attention_of_drawing(self, chunks: Chunks, packed: Packed, longest: int) -> DecodeAttention | None:
        """Attention of each row's last token alone; None where all tokens are too few for the extra launches, and
        where a row may draw more than once.

        A row that draws nothing (a chunk before the last one, padding) sees one key: nobody reads its result.
        """
        tokens, rows = len(chunks.slots_T), len(chunks.logit_rows_R)
        if self.row_tokens > 1 or tokens < max(LARGE_STEP, _TOKENS_A_DRAW * rows):
            return None
        table_RP = self._parts.tables.gather_blocks(chunks.slots_T.index_select(0, chunks.logit_rows_R))
        lengths_R = packed.positions_T.index_select(0, chunks.logit_rows_R) + 1
        lengths_R = torch.where(chunks.emitting_R == PADDING_SLOT, 1, lengths_R).to(torch.int32)
        return DecodeAttention(table_RP, lengths_R, 1, longest)

    def finish(
        self, hidden_RN: Tensor, features_RF: Tensor | None, emitting_R: Tensor, variant: SamplingVariant
    ) -> None:
        """The rest of it: a token for every row that is not the padding slot's, which the proposer is shown behind the
        newest token that the row had."""
        if not self._feed.on:
            columns = self._parts.tables.gather(emitting_R)
            self._tail.finish(hidden_RN, emitting_R, columns, columns.sampling(), variant)
            return
        size = self._parts.limits.block_size
        rows = gather_decode(self._parts.tables, emitting_R, size)
        draw, verdict = self._tail.finish(hidden_RN, emitting_R, rows.columns, rows.sampling, variant)
        longest = rows.page_table_BP.shape[1] * size
        inputs = StepInputs(
            token_ids_T=rows.token_B,
            positions_T=rows.position_B,
            kv_slots_T=rows.kv_slots_B,
            attention=DecodeAttention(rows.page_table_BP, rows.kv_lengths_B, 1, longest),
            real_T=rows.live_B,
        )
        self._feed.show_rows(inputs, emitting_R, hidden_RN, features_RF, draw, verdict)

    @property
    def feature_size(self) -> int:
        """F: how many numbers the proposer reads of a token's layers; 0 where it reads none."""
        return 0 if self._feed.tap is None else len(self._feed.tap.layers) * self._parts.model.config.hidden_size

    @property
    def splits_keys(self) -> bool:
        """Whether steps with ``split_keys`` can be captured."""
        return self._parts.model.splits_chunks(self._parts.caches)

    def attention_for_graphs(self, page_table_BP: Tensor, max_tokens: int) -> RepeatedPrefill | None:
        """Attention for captured prefill steps over this role's cache; see Kernels.repeat_prefill."""
        return self._parts.model.repeat_prefill(page_table_BP, max_tokens, self._parts.caches)

    def _rehearse(self, tokens: int) -> None:
        """So many tokens on the padding slot: nothing but the trash block is written."""
        lengths = padding_lengths(tokens, self._parts.limits)
        chunks = _padding_chunks(lengths, self._parts.device.torch_device)
        exchanges = self._parts.config.exchanges
        self.prefill(chunks, Lengths(lengths, lengths), GREEDY, exchange_rows=exchanges[-1] if exchanges else 0)
        self._parts.ring.undo()


def padding_lengths(tokens: int, limits: StepLimits) -> tuple[int, ...]:
    """Rows that so many tokens fill, none over the longest sequence; those past the last row are left out."""
    lengths: list[int] = []
    while tokens and len(lengths) < limits.rows:
        lengths.append(min(tokens, limits.max_model_len))
        tokens -= lengths[-1]
    return tuple(lengths)


def shorter_prefills(most: int) -> Iterator[int]:
    """Tokens of prefills that are rehearsed besides the one of ``most``.

    Kernels are chosen and compiled by ranges of sizes, each of which is twice as long as it begins, or longer.
    """
    tokens = min(most // 2, 2048)
    while tokens >= 32:
        yield tokens
        tokens //= 2


def _padding_chunks(lengths: tuple[int, ...], device: torch.device) -> Chunks:
    """Chunks of the padding slot on the device, as staging would lay them out, without staging."""
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    ends = torch.tensor(lengths).cumsum(0) - 1
    rows = torch.full((len(lengths),), PADDING_SLOT, dtype=torch.int64, device=device)
    padding = torch.full_like(positions, PADDING_SLOT)
    return Chunks(padding, positions, padding, rows, rows, ends.to(device), torch.zeros_like(rows))
