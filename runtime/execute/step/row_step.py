"""A step of decode requests alone: propose, forward and tail in one CUDA graph a (bucket, sampling variant).

Knows: what such a step computes, how it is measured, warmed up, tried and launched. Does not know: which proposer there
is, how rows are gathered and sampled (gather.py, tail.py), packed steps.

With W = 1 a row appends one token. With a wider W the forward pass verifies a window of W tokens a row, a chain, or a
draft tree of more tokens (``limits.tree``) of which a row appends a path. A tree's KV entries lie in the order of its
nodes; the tail moves those of the path to where a chain's would be. Recurrent layers follow a node's parent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from models.inputs import StateRows, StateTree, Undecided
from runtime.execute.cache.block_copy import EntryMover
from runtime.execute.launch_spec import GREEDY, LaunchSpec
from runtime.execute.proposer import Proposer, guesses_for
from runtime.execute.sampling.inputs import KERNEL_VARIANTS, SamplingVariant
from runtime.execute.sampling.logprobs import StepPromptLogprobs
from runtime.execute.step.commit import ProposerFeed
from runtime.execute.step.gather import Rows, gather_decode, gather_window
from runtime.execute.step.graphs import RowGraphs
from runtime.execute.step.memory import StepParts, Trial
from runtime.execute.step.tail import Tail
from runtime.schedule.plan import PADDING_SLOT, StepKind, StepPlan


class RowStep:
    """Up to ``width`` tokens a row. ``proposer``: of the draft tokens, default that of the parts; unused for W = 1.

    ValueError for a wider W without a proposer, or with a model whose state cannot leave out tokens.
    """

    def __init__(
        self, parts: StepParts, width: int = 1, proposer: Proposer | None = None, name: str | None = None
    ) -> None:
        limits = parts.limits
        tree = limits.tree if 1 < width == limits.width else 0
        self._proposer = None if width == 1 else proposer or parts.proposer
        if width > 1 and self._proposer is None:
            raise ValueError("a window needs a proposer")
        if width > 1 and (stuck := parts.model.irrevocable):
            raise ValueError(
                f"windows of {width}: rows may append fewer tokens, and recurrent state cannot be rolled back by "
                f"{', '.join(stuck)}"
            )
        self.name = name or (f"tree of {tree}" if tree else "decode" if width == 1 else f"window of {width}")
        self.width = width
        self.tokens = tree or width  # of a row, that go through the model
        self.widens = True  # each bucket is captured for the all-to-alls of packed steps as well
        self._parts = parts
        self._mover = EntryMover.of_paged(parts.caches, parts.model.cache_layout) if tree else None
        self._feed = ProposerFeed(parts.proposer)
        self._tail = Tail(parts.model, parts.tables, parts.ring)
        maps = {bucket: parts.staging.row_map(self.name, bucket) for bucket in parts.config.decode_buckets}
        few = parts.model.few_layers
        self.graphs = RowGraphs(self.name, parts.device, self.decode, parts.ring, maps, few, width)

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        return kind is StepKind.DECODE and plan.width == self.width

    def launch(self, spec: LaunchSpec, scores: StepPromptLogprobs | None) -> None:
        shape = spec.shape
        self.graphs[shape.rows, shape.variant, shape.exchange].replay()

    # ---- what a step computes ----

    def decode(self, rows_B: Tensor, variant: SamplingVariant, exchange: int = 0) -> None:
        """One step of slots ``rows_B`` (int64 [B]), graph-safe, with one append to the result ring; ghost and padding
        rows append no token. ``exchange``: as in StepShape."""
        parts = self._parts
        rows = self._gather(rows_B, variant)
        # With a window, state is updated when it is known which tokens are accepted.
        undecided: list[Undecided] = []
        state = None
        if parts.has_slot_state:
            live_B = rows.live_BW[:, 0] if self.width == 1 else rows.columns.finished == 0
            slots_B = torch.where(live_B, rows_B, PADDING_SLOT)
            tree = None if rows.tree is None else StateTree(rows.tree.parents_BN, rows.tree.seen_BN)
            state = self.slot_state(slots_B, undecided=undecided.append, tree=tree)
        inputs = rows.inputs(parts.limits.block_size, state, exchange)
        hidden_TN = parts.model.forward(inputs, parts.caches, self._feed.tap)
        committed = self._tail.finish(hidden_TN, rows, self.width, variant)
        accepted = committed.accepted
        if self._mover is not None and accepted.nodes_BW is not None:
            self._mover.move_path(rows.places, accepted.nodes_BW, accepted.count_B)
        if state is not None and undecided:
            kept = replace(state, undecided=None, kept_B=accepted.count_B, path_BW=accepted.nodes_BW)
            for layer in undecided:
                layer.advance(layer.made_TX, kept, inputs.positions_T)
        if self._feed.on:
            self._feed.show(inputs, rows, hidden_TN, self._feed.features_TF, committed)

    def _gather(self, rows_B: Tensor, variant: SamplingVariant) -> Rows:
        tables, size = self._parts.tables, self._parts.limits.block_size
        if self._proposer is None:
            return gather_decode(tables, rows_B, size)
        columns = tables.gather(rows_B)
        proposed = guesses_for(self._proposer, tables, rows_B, columns, self.tokens - 1, variant)
        return gather_window(tables, rows_B, columns, proposed, size, self.width)

    def slot_state(
        self, slots_B: Tensor, *, undecided: Callable[[Undecided], None], tree: StateTree | None
    ) -> StateRows:
        """Recurrent state of the rows' slots (int64 [B]). The forward pass of a draft window does not change it."""
        return StateRows(slots_B) if self.width == 1 else StateRows(slots_B, undecided=undecided, tree=tree)

    # ---- start-up ----

    def rehearse(self) -> None:
        """The largest bucket, with every variant that will be warmed up, and a layer of each kind of the other buckets;
        on a CPU, where nothing is compiled or measured, greedy sampling of the largest only.
        """
        config = self._parts.config
        largest, *others = config.decode_buckets[::-1]
        self.try_variant(largest, GREEDY)
        if self._parts.device.torch_device.type == "cpu":
            return
        for variant in config.warm_variants:
            self.try_variant(largest, variant)
        with self._parts.model.few_layers():
            for bucket in others:
                self.try_variant(bucket, GREEDY)

    def compile_sampling(self) -> None:
        """Propose and sample for padding with every kernel in every form, so that no request waits for a compiler;
        nothing on a CPU."""
        parts, device = self._parts, self._parts.device.torch_device
        if device.type == "cpu":
            return
        rows_B = torch.full((parts.config.decode_buckets[0],), PADDING_SLOT, dtype=torch.int64, device=device)
        for variant in dict.fromkeys(variant.on_ranks(parts.model.collectives.size) for variant in KERNEL_VARIANTS):
            with parts.tables.trial(slots=PADDING_SLOT + 1):
                self._tail.rehearse(self._gather(rows_B, variant), self.width, variant)

    def try_variant(self, bucket: int, variant: SamplingVariant, exchange: int = 0) -> None:
        """Run one step over padding, uncaptured: nothing is reported or kept."""
        rows_B = torch.zeros(bucket, dtype=torch.int64, device=self._parts.device.torch_device)
        self.decode(rows_B, variant, exchange)
        self._parts.ring.undo()

    def trials(self, bucket: int, variant: SamplingVariant) -> Sequence[Trial]:
        """All layers, since a recurrent one keeps what it made of a window to the end of the step; in groups with the
        widest all-to-all that is captured."""
        return [partial(self.try_variant, bucket, variant, max(self._exchanges(bucket)))]

    def warm_up(self) -> None:
        self.graphs.warm_up(self._parts.config.warm_variants, self._exchanges)

    def _exchanges(self, bucket: int) -> set[int]:
        """Rows of the all-to-alls with which a bucket is captured: its own, those of the widest window in another
        group, and if ``widens`` those of packed steps."""
        config, tokens = self._parts.config, bucket * self.tokens
        if not config.exchanges:
            return {0}
        packed = (rows for rows in config.exchanges if self.widens and rows > tokens)
        return {tokens, bucket * config.limits.window, *packed}
