"""A step with prefill chunks, captured in parts or launched kernel by kernel.

Knows: which parts are captured, what they hand over, how such a step is measured, warmed up, tried and launched. Does
not know: what a part computes (packed_pass.py), where draft tokens come from (drafts.py), other steps.

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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.inputs import PlanTable, PrefillAttention
from runtime.execute.device.protocol import Graph
from runtime.execute.launch_spec import GREEDY, MOST_SPLIT_TOKENS, LaunchSpec
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.logprobs import StepPromptLogprobs
from runtime.execute.staging import Chunks
from runtime.execute.step.graphs import RowGraphs, capture
from runtime.execute.step.memory import PassBuffers, StepParts, Trial
from runtime.execute.step.packed_pass import DecodeTokens, Lengths, PackedPass
from runtime.schedule.plan import PADDING_SLOT, StepKind, StepPlan

log = logging.getLogger(__name__)


class PackedStep:
    """Runs plans with prefill chunks whose decode requests are as ``decode`` says; by default one token each.

    Captured for token counts of ``config.prefill_buckets`` on every rank or on none: without buckets, and if some
    rank's attention cannot be captured, ``buckets`` stays empty.
    """

    def __init__(self, parts: StepParts, decode: DecodeTokens | None = None) -> None:
        self.decode = DecodeTokens(parts) if decode is None else decode
        self.name, self.width = self.decode.name, self.decode.width
        self._parts = parts
        self.work = PackedPass(parts, self.decode)
        self._passes: dict[tuple[int, bool], Graph] = {}  # by tokens and split keys
        self._in_propose, self._in_forward, self._in_tail = map(parts.part_range, ("propose", "forward", "tail"))

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        return kind is not StepKind.DECODE and plan.width == self.width

    # ---- what is captured ----

    @cached_property
    def tails(self) -> RowGraphs:
        """Graphs of the tail, by number of rows and by each sampling variant requested so far."""
        emitting_R = self._parts.staging.padded_chunks(self._parts.staging.max_rows).emitting_R
        maps = {bucket: emitting_R[:bucket] for bucket in self._parts.config.decode_buckets}
        return RowGraphs("tail", self._parts.device, self._captured_tail, self._parts.ring, maps, width=self.width)

    @cached_property
    def proposals(self) -> RowGraphs:
        """Graphs of the propose part, by number of decode rows; these rows come first in the row map of ``tails``."""

        def propose(rows_B: Tensor, variant: SamplingVariant, exchange: int) -> None:
            self.decode.propose(len(rows_B), variant)

        return RowGraphs("proposal", self._parts.device, propose, None, self.tails.row_maps)

    @property
    def row_graphs(self) -> list[RowGraphs]:
        """Graphs that may be captured after start-up, when a request needs another sampling variant."""
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
        buffers = self._parts.memory.passes(self._parts, self.work.feature_size)
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
        self.work.prefill(chunks, lengths, shape.variant, scores, shape.exchange, copied_2C)

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

    # ---- captured parts ----

    @property
    def _memory(self) -> PassBuffers:
        assert self._buffers is not None  # or there would be no bucket
        return self._buffers

    def _captured_tail(self, emitting_B: Tensor, variant: SamplingVariant, exchange: int) -> None:
        _, _, hidden_XN, features_XF, _ = self._memory
        sampled = len(emitting_B) * self.decode.tokens
        features_XF = None if features_XF is None else features_XF[:sampled]
        self.work.finish(hidden_XN[:sampled], features_XF, emitting_B, variant)

    def _pass(self, tokens: int, split_keys: bool) -> None:
        """The forward pass of what is staged, of ``tokens`` tokens; graph-safe."""
        page_table_BP, attention, kept_XN, kept_XF, _ = self._memory
        config, grouped = self._parts.config, bool(self._parts.config.exchanges)
        mixed = config.mixed or grouped  # some groups may decode while others have chunks
        chunks = self._parts.staging.padded_chunks(tokens)
        rows = len(chunks.slots_R)
        page_table_BP[..., :rows, :].copy_(self._parts.tables.gather_groups(chunks.slots_R))
        read = PrefillAttention(page_table_BP, (tokens,), (tokens,), attention)
        hidden_XN, features_XF = self.work.hidden(
            chunks, read, tokens if grouped else 0, mixed=mixed, split_keys=split_keys, captured=True
        )
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
        self.work.prefill(chunks, Lengths(lengths, lengths), GREEDY, exchange=exchanges[-1] if exchanges else 0)
        self._parts.ring.undo()

    def _rehearse_tail(self, variant: SamplingVariant) -> None:
        """Of as many rows as there may be, over padding."""
        parts, rows, size = self._parts, self._parts.staging.max_rows, self.work.feature_size
        zeros, tokens, dtype = parts.device.zeros, rows * self.decode.tokens, parts.model.dtype
        features_XF = zeros(tokens, size, dtype=dtype) if size else None
        hidden_XN = zeros(tokens, parts.model.config.hidden_size, dtype=dtype)
        self.work.finish(hidden_XN, features_XF, zeros(rows, dtype=torch.int64), variant)
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
