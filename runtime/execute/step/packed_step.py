"""A step with prefill chunks: packed tokens of decode requests and chunks; every row that is due samples.

Knows: what such a step computes, and what its captured parts hand over. Does not know: how prompts were cut, where
draft tokens come from (drafts.py), other steps.

Launched kernel by kernel, such a step costs the host tens of milliseconds, whatever its size: more than the device
needs for a short prompt. So it is captured as two graphs, or three if decode requests have draft tokens:

    propose   by decode rows, and by what samples draft tokens
    forward   by tokens alone, filled up with tokens of the padding slot. Which tokens decode, and how long their rows
              are, is read from device tables, so rows x tokens x kinds of sampling are no graphs
    tail      head, sampling and write-back, by rows and kind of sampling, as in a step of decode requests

Steps that score prompt tokens are not captured: they need the last layer of all tokens. Data-parallel groups that share
experts replay the same forward graph together, also a group without a chunk; so its all-to-all is no further key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.inputs import DecodeAttention, MixedAttention, PlanTable, PrefillAttention, StateRows, StepInputs
from models.row_buckets import LARGE_STEP
from runtime.execute.device.protocol import Graph
from runtime.execute.launch_spec import GREEDY, MOST_PIECES, MOST_SPLIT_TOKENS, LaunchSpec
from runtime.execute.proposer import Observed
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.prompt_logprobs import StepPromptLogprobs
from runtime.execute.slot_state import NEWEST
from runtime.execute.staging import Chunks
from runtime.execute.step.commit import Committed, ProposerFeed
from runtime.execute.step.gather import Packed, Rows, gather_decode, gather_packed, pieces_of
from runtime.execute.step.graphs import RowGraphs, capture
from runtime.execute.step.memory import PassBuffers, StepParts, Trial
from runtime.execute.step.tail import Tail
from runtime.schedule.plan import PADDING_SLOT, TRASH_BLOCK, StepKind, StepPlan

log = logging.getLogger(__name__)

_TOKENS_A_SAMPLE = 8  # from so many on, the last layer's queries and attention are worth launches of their own


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


class PackedStep:
    """Runs plans with prefill chunks whose decode requests are as ``decode`` says; by default one token each.

    Captured for token counts of ``config.prefill_buckets`` on every rank or on none: without buckets, and if some
    rank's attention cannot be captured, ``buckets`` stays empty.
    """

    def __init__(self, parts: StepParts, decode: DecodeTokens | None = None) -> None:
        self.decode = DecodeTokens(parts) if decode is None else decode
        self.name, self.width = self.decode.name, self.decode.width
        self._parts = parts
        self._tail = Tail(parts.model, parts.tables, parts.ring)
        self._feed = ProposerFeed(parts.proposer)
        self._passes: dict[tuple[int, bool], Graph] = {}  # by tokens and split keys
        self._in_propose, self._in_forward, self._in_tail = map(parts.part_range, ("propose", "forward", "tail"))

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        return kind is not StepKind.DECODE and plan.width == self.width

    # ---- what is captured ----

    @cached_property
    def tails(self) -> RowGraphs:
        """By rows, in every kind of sampling that was asked for so far."""
        emitting_R = self._parts.staging.padded_chunks(self._parts.staging.max_rows).emitting_R
        maps = {bucket: emitting_R[:bucket] for bucket in self._parts.config.decode_buckets}
        return RowGraphs("tail", self._parts.device, self._captured_tail, self._parts.ring, maps, width=self.width)

    @cached_property
    def proposals(self) -> RowGraphs:
        """By decode rows. Which rows decode is read where the tails' row map lies."""

        def propose(rows_B: Tensor, variant: SamplingVariant, exchange: int) -> None:
            self.decode.propose(len(rows_B), variant)

        return RowGraphs("proposal", self._parts.device, propose, None, self.tails.row_maps)

    @property
    def row_graphs(self) -> list[RowGraphs]:
        """Those that may be captured late."""
        return [self.tails, self.proposals] if self.decode.proposes else [self.tails]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts that are captured, ascending."""
        return tuple(sorted(tokens for tokens, split in self._passes if not split))

    @property
    def split_buckets(self) -> tuple[int, ...]:
        """Those of them that are captured with split keys as well."""
        return tuple(sorted(tokens for tokens, split in self._passes if split))

    @property
    def captured(self) -> int:
        """Number of forward graphs."""
        return len(self._passes)

    @cached_property
    def _wanted(self) -> list[tuple[int, bool]]:
        """The forward graphs to capture, by tokens and split keys, in that order."""
        buffers = self._buffers
        if buffers is None:
            return []
        largest_first = sorted((n for n in self._parts.config.prefill_buckets if n >= self.decode.tokens), reverse=True)
        split = [(tokens, True) for tokens in largest_first if buffers.split and tokens <= MOST_SPLIT_TOKENS]
        return [(tokens, False) for tokens in largest_first] + split

    @cached_property
    def _buffers(self) -> PassBuffers | None:
        """None if nothing is captured."""
        if not any(tokens >= self.decode.tokens for tokens in self._parts.config.prefill_buckets):
            return None
        tap = self._feed.tap
        size = 0 if tap is None else len(tap.layers) * self._parts.model.config.hidden_size
        buffers = self._parts.memory.passes(self._parts, size)
        if buffers is not None and (table := buffers.attention.table) is not None:
            self._parts.staging.bring_attention_plans(self.name, partial(_planned, table), table.place)
        return buffers

    # ---- launch ----

    def launch(self, spec: LaunchSpec, scores: StepPromptLogprobs | None) -> None:
        kernels = self._parts.model.kernels
        if kernels.slower_prefill is not None:
            self._parts.fallbacks.take(f"{kernels.prefill_name}_prefill", kernels.slower_prefill)
        if spec.captured:
            self.replay(spec)
        else:
            self._count_fallback(spec)
            chunks, lengths = self._parts.staging.chunks(spec), Lengths.of(spec.plan)
            self._parts.device.compute.submit(lambda: self._launch_eagerly(spec, chunks, lengths, scores))

    def replay(self, spec: LaunchSpec) -> None:
        """Put a captured step, whose chunks are staged and padded to ``spec.captured``, on the compute stream."""
        shape = spec.shape
        if shape.proposing:
            with self._in_propose:
                self.proposals[shape.proposing, self.decode.proposal_variant(shape.variant), 0].replay()
        with self._in_forward:
            attention = self._memory.attention
            if not shape.split_keys and attention.table is None:
                self._plan(Lengths.of(spec.plan))
            self._passes[spec.captured, shape.split_keys].replay()
        self.copy_forked(spec)
        with self._in_tail:
            self.tails[shape.rows, shape.variant, 0].replay()

    def _launch_eagerly(
        self, spec: LaunchSpec, chunks: Chunks, lengths: Lengths, scores: StepPromptLogprobs | None
    ) -> None:
        shape = spec.shape
        if shape.proposing:
            self.decode.propose(shape.proposing, shape.variant)
        copied_2C = self._parts.staging.copied_blocks(spec)
        self.prefill(chunks, lengths, shape.variant, scores, shape.exchange, copied_2C)

    def copy_forked(self, spec: LaunchSpec) -> None:
        """Between forward pass and tail: the blocks in whose middle prompts end, for answers that fork.

        The tail shows the proposer what each answer sampled, for which it may write entries into these blocks.
        """
        if (copied_2C := self._parts.staging.copied_blocks(spec)).shape[1]:
            self._parts.device.compute.submit(lambda: self._parts.pool.copy_blocks(copied_2C))

    def _plan(self, lengths: Lengths) -> None:
        self._parts.device.compute.submit(lambda: self._memory.attention.plan(*lengths))

    def _count_fallback(self, spec: LaunchSpec) -> None:
        """A step that is launched kernel by kernel although such steps are captured; each reason has a name."""
        if not self._parts.config.prefill_buckets:
            return
        if not self.buckets:
            name = "eager_prefill_attention"
            reason = f"attention of {self._parts.model.kernels.prefill_name} cannot be captured on every rank"
        elif spec.plan.scored_tokens:
            name = "eager_prefill_scored"
            reason = "log-probabilities of prompt tokens need the last layer of every token"
        else:
            name = "eager_prefill_beyond_buckets"
            tokens, largest = spec.plan.packed_tokens, self.buckets[-1]
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
        exchange: int = 0,
        copied_2C: Tensor | None = None,
    ) -> None:
        """Forward and tail; a chunk that is not its prompt's last samples nothing.

        ``scores`` receives the log-probabilities of ``chunks.scored_2S``; None for none. ``copied_2C``: see
        ``copy_forked``.
        """
        model = self._parts.model
        attention = lengths.attention(self._parts.tables.gather_blocks(chunks.slots_R))
        scored_2S = None if scores is None else chunks.scored_2S
        every_token, mixed = scored_2S is not None, lengths.first_token > 0
        hidden, features_XF = self._hidden(chunks, attention, exchange, mixed=mixed, every_token=every_token)
        if scores is not None and scored_2S is not None:
            scores.fill(hidden, scored_2S, lambda h_RN: model.gather_logits(model.logits(h_RN)))
            hidden = hidden.index_select(0, chunks.logit_rows_R)
        if copied_2C is not None and copied_2C.shape[1]:
            self._parts.pool.copy_blocks(copied_2C)
        self._finish(hidden, features_XF, chunks.emitting_R, variant)

    def _hidden(
        self,
        chunks: Chunks,
        attention: PrefillAttention,
        exchange: int = 0,
        *,
        mixed: bool = False,
        every_token: bool = False,
        split_keys: bool = False,
        captured: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
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
        table_RP = attention.page_table_BP[: len(chunks.slots_R)]
        longest = table_RP.shape[1] * size
        of_decode = DecodeAttention(
            table_RP[:could_decode],
            packed.kv_lengths_R[:could_decode],
            decode.tokens,
            longest,
            skip_empty=True,
            tree_BQ=decode.tree(chunks.slots_R[:could_decode]),
        )
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
        kept_kv_slots_T = torch.where(kept_T, inputs.kv_slots_T, TRASH_BLOCK)
        features_TF = self._feed.features_TF
        self._feed.observe(Observed(inputs, slots_T, next_ids_T, kept_T, kept_kv_slots_T, hidden_TN, features_TF))

    def _attention_of_sampled(self, chunks: Chunks, packed: Packed, longest: int) -> DecodeAttention | None:
        """Attention of each row's last token alone; None if all tokens are too few for the extra launches, and for rows
        that may sample more than once.

        A row that samples nothing (a chunk before the last one, padding) sees one key: its result is not read.
        """
        tokens, rows = len(chunks.slots_T), len(chunks.logit_rows_R)
        if self.decode.tokens > 1 or tokens < max(LARGE_STEP, _TOKENS_A_SAMPLE * rows):
            return None
        table_RP = self._parts.tables.gather_blocks(chunks.slots_T.index_select(0, chunks.logit_rows_R))
        lengths_R = packed.positions_T.index_select(0, chunks.logit_rows_R) + 1
        lengths_R = torch.where(chunks.emitting_R == PADDING_SLOT, 1, lengths_R).to(torch.int32)
        return DecodeAttention(table_RP, lengths_R, 1, longest)

    def _finish(
        self, hidden_XN: Tensor, features_XF: Tensor | None, emitting_R: Tensor, variant: SamplingVariant
    ) -> None:
        """The tail: rows of slots ``emitting_R`` sample, and the proposer observes their newest tokens."""
        rows, committed = self.decode.finish(self._tail, hidden_XN, emitting_R, variant)
        if self._feed.on:
            inputs = rows.inputs(self._parts.limits.block_size)
            self._feed.show(inputs, rows, hidden_XN, features_XF, committed)

    # ---- captured parts ----

    @property
    def _memory(self) -> PassBuffers:
        assert self._buffers is not None  # or there would be no bucket
        return self._buffers

    def _captured_tail(self, emitting_B: Tensor, variant: SamplingVariant, exchange: int) -> None:
        _, _, hidden_XN, features_XF, _ = self._memory
        sampled = len(emitting_B) * self.decode.tokens
        self._finish(hidden_XN[:sampled], None if features_XF is None else features_XF[:sampled], emitting_B, variant)

    def _pass(self, tokens: int, split_keys: bool) -> None:
        """The forward pass of what is staged, of ``tokens`` tokens; graph-safe."""
        page_table_BP, attention, kept_XN, kept_XF, _ = self._memory
        config, grouped = self._parts.config, bool(self._parts.config.exchanges)
        mixed = config.mixed or grouped  # some groups may decode while others have chunks
        chunks = self._parts.staging.padded_chunks(tokens)
        rows = len(chunks.slots_R)
        page_table_BP[:rows].copy_(self._parts.tables.gather_blocks(chunks.slots_R))
        read = PrefillAttention(page_table_BP, (tokens,), (tokens,), attention)
        exchange = tokens if grouped else 0
        hidden_XN, features_XF = self._hidden(chunks, read, exchange, mixed=mixed, split_keys=split_keys, captured=True)
        kept_XN[: len(hidden_XN)].copy_(hidden_XN)
        if kept_XF is not None and features_XF is not None:
            kept_XF[: len(features_XF)].copy_(features_XF)

    def _rehearse_pass(self, tokens: int, split_keys: bool) -> None:
        """Nothing is staged yet: every token is the padding slot's."""
        self._memory.attention.plan(*self.rows_of(tokens))
        with self._parts.model.few_layers():
            self._pass(tokens, split_keys)

    def rows_of(self, tokens: int) -> Lengths:
        """Rows that so many tokens fill, none longer than the longest sequence; rows past the page table's last one are
        left out."""
        lengths = padding_lengths(tokens, self._parts.limits.max_model_len, self._parts.staging.max_rows)
        return Lengths(lengths, lengths)

    # ---- start-up ----

    def rehearse(self) -> None:
        """The largest step that a plan can ask for. If draft tokens are sampled, the largest tails as well: besides
        what these were sampled from there must be room for all of their logits."""
        self._rehearse(self._parts.limits.max_prefill_tokens)
        if self._parts.device.torch_device.type != "cpu":
            for variant in self._parts.config.warm_variants:
                if self.decode.proposal_variant(variant).random:
                    self._rehearse_tail(variant)

    def compile_shorter(self) -> None:
        """Run smaller steps as well, so that no request waits for a compiler; on a CPU nothing is compiled."""
        if self._parts.device.torch_device.type != "cpu":
            with self._parts.model.few_layers():
                for tokens in shorter_prefills(self._parts.limits.max_prefill_tokens):
                    self._rehearse(tokens)

    def rehearsals(self) -> list[Callable[[], None]]:
        """What is captured, uncaptured, over padding and with a layer of each kind: it compiles the kernels."""
        if not self._wanted:
            return []
        found: list[Callable[[], None]] = [partial(self._rehearse_pass, *one) for one in self._wanted]
        kinds = [(self.tails, self._parts.config.warm_variants)]
        if self.decode.proposes:
            kinds.insert(0, (self.proposals, self._proposal_variants))
        for graphs, variants in kinds:
            found += [partial(graphs.run_over_padding, bucket, one) for bucket in graphs.row_maps for one in variants]
        return found

    def trials(self, bucket: int, variant: SamplingVariant) -> Sequence[Trial]:
        """After the warm-up: tails read what forward passes hand over."""
        if not self.buckets:
            return []
        tail = partial(self.tails.run_over_padding, bucket, variant)
        if not self.decode.proposes:
            return [tail]
        return [partial(self.proposals.run_over_padding, bucket, self.decode.proposal_variant(variant)), tail]

    def warm_up(self) -> None:
        """Capture all graphs, the largest first so that the shared memory pool is sized once, and replay that one."""
        if not self._wanted:
            return
        began, device, (largest, _) = time.perf_counter(), self._parts.device, self._wanted[0]
        device.release_unused()  # of the rehearsals before: the graphs' pool takes its place
        for tokens, split_keys in self._wanted:
            self._passes[tokens, split_keys] = capture(
                device,
                partial(self._pass, tokens, split_keys),
                partial(self._rehearse_pass, tokens, split_keys),
                name=self.name,
                size=f"{tokens} tokens",
                way_out="--memory-fraction or --max-num-batched-tokens; --no-prefill-graphs does without these graphs",
            )
        if self.decode.proposes:
            self.proposals.warm_up(self._proposal_variants)
        self.tails.warm_up(self._parts.config.warm_variants)
        device.release_unused()  # of the rehearsals here
        self.replay_padding(largest)
        self.tails[self._parts.config.decode_buckets[-1], GREEDY, 0].replay()
        device.compute.submit(self._parts.ring.undo)  # no step reported it
        took = time.perf_counter() - began
        log.info(
            "graphs: %d of %s steps of up to %d tokens captured in %.1f s", self.captured, self.name, largest, took
        )

    def replay_padding(self, tokens: int) -> None:
        """Run the forward pass of a captured number of tokens over padding; nothing is reported."""
        self._plan(self.rows_of(tokens))
        self._passes[tokens, False].replay()

    @property
    def _proposal_variants(self) -> tuple[SamplingVariant, ...]:
        """Variants in which proposals are captured."""
        return tuple(dict.fromkeys((GREEDY, *map(self.decode.proposal_variant, self._parts.config.warm_variants))))

    def _rehearse(self, tokens: int) -> None:
        """So many tokens on the padding slot: nothing but the trash block is written."""
        limits, exchanges = self._parts.limits, self._parts.config.exchanges
        lengths = padding_lengths(tokens, limits.max_model_len, limits.rows)
        chunks = _padding_chunks(lengths, self._parts.device.torch_device)
        self.prefill(chunks, Lengths(lengths, lengths), GREEDY, exchange=exchanges[-1] if exchanges else 0)
        self._parts.ring.undo()

    def _rehearse_tail(self, variant: SamplingVariant) -> None:
        """Of as many rows as there may be, over padding."""
        parts, tap, rows = self._parts, self._feed.tap, self._parts.staging.max_rows
        zeros, tokens, hidden = parts.device.zeros, rows * self.decode.tokens, parts.model.config.hidden_size
        hidden_XN = zeros(tokens, hidden, dtype=parts.model.dtype)
        features_XF = None if tap is None else zeros(tokens, len(tap.layers) * hidden, dtype=parts.model.dtype)
        self._finish(hidden_XN, features_XF, zeros(rows, dtype=torch.int64), variant)
        parts.ring.undo()


def padding_lengths(tokens: int, longest: int, rows: int) -> tuple[int, ...]:
    """Rows that so many tokens fill, none over ``longest``; those past the last of ``rows`` are left out."""
    whole, rest = divmod(tokens, longest)
    return ((longest,) * whole + ((rest,) if rest else ()))[:rows]


def shorter_prefills(most: int) -> Iterator[int]:
    """Tokens of prefills that are rehearsed besides the one of ``most``.

    Kernels are chosen and compiled by ranges of sizes, each of which is twice as long as it begins, or longer.
    """
    tokens = min(most // 2, 2048)
    while tokens >= 32:
        yield tokens
        tokens //= 2


def _planned(table: PlanTable, spec: LaunchSpec) -> npt.NDArray[np.int32] | None:
    """The entries of a step's attention plan; None for a step that reads none."""
    if not spec.captured or spec.shape.split_keys:
        return None
    return table.entries(*Lengths.of(spec.plan), tokens=spec.captured)


def _padding_chunks(lengths: tuple[int, ...], device: torch.device) -> Chunks:
    """Chunks of the padding slot on the device, as staging would lay them out, without staging."""
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    ends = torch.tensor(lengths).cumsum(0) - 1
    rows = torch.full((len(lengths),), PADDING_SLOT, dtype=torch.int64, device=device)
    padding = torch.full_like(positions, PADDING_SLOT)
    return Chunks(padding, positions, padding, rows, rows, ends.to(device), torch.zeros_like(rows))
