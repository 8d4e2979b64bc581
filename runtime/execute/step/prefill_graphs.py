"""Captured steps with chunks: one graph a number of tokens up to the hidden states, one a number of rows behind it.

Knows: which token counts are captured, and what every replay reads anew: staged tokens and rows, page tables, the plan
of the chunks' attention, which is staged with them where it is a table. Does not know: what a step computes
(prefill.py), which steps are replayed (launch_spec.py).

Launched kernel by kernel, such a step costs the host tens of milliseconds, whatever its size: more than the device
needs for a short prompt. So it is two launches:

    forward   keyed by its tokens alone, filled up with tokens of the padding slot. Which tokens decode, and how long
              their rows are, is read from device tables, so that rows x tokens x kinds of sampling are no graphs.
    tail      head, draw and write-back, keyed by rows and kind of sampling, as decode graphs are.

Where rows decode in windows, a third comes first: the proposals, keyed by those rows, and by what draws them.

Steps that score prompt tokens have none: they need the last layer of all tokens, the others of one a row.

Where groups share experts, each brings as many rows to an exchange as its step is padded to, and all replay the same
forward graph: so the exchange is no dimension of its own. A group without a chunk replays it, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.inputs import PlanTable, PrefillAttention, RepeatedPrefill
from models.row_buckets import token_ladder
from runtime.execute.device.protocol import DeviceError, Graph
from runtime.execute.launch_spec import GREEDY, MOST_SPLIT_TOKENS, LaunchSpec
from runtime.execute.role import RoleParts, Trial
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.staging import Chunks
from runtime.execute.step.row_graphs import CaptureError, RowGraphs
from runtime.schedule.plan import StepPlan

log = logging.getLogger(__name__)


class Lengths(NamedTuple):
    """What the host knows of the rows of a step with chunks; all three as in PrefillAttention.

    ``query`` and ``kv`` (tokens of KV behind the chunk) are 0 for rows that decode, whose tokens come first, and for
    forks, which come last and have none: so all may be 0, of a group that decodes while another has a chunk.
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


class PrefillWork(Protocol):
    """What is captured: prefill.py's PrefillRole, or mixed_window.py's."""

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def row_tokens(self) -> int: ...
    @property
    def proposes(self) -> bool: ...
    @property
    def splits_keys(self) -> bool: ...
    def copy_forked(self, spec: LaunchSpec) -> None: ...
    def propose(self, rows: int, variant: SamplingVariant) -> None: ...
    def guessed_by(self, variant: SamplingVariant) -> SamplingVariant: ...
    def hidden(
        self,
        chunks: Chunks,
        attention: PrefillAttention,
        exchange_rows: int = 0,
        *,
        mixed: bool,
        split_keys: bool = False,
        captured: bool = False,
    ) -> tuple[Tensor, Tensor | None]: ...
    def finish(
        self, hidden_XN: Tensor, features_XF: Tensor | None, emitting_R: Tensor, variant: SamplingVariant
    ) -> None: ...
    @property
    def feature_size(self) -> int: ...
    def attention_for_graphs(self, page_table_BP: Tensor, max_tokens: int) -> RepeatedPrefill | None: ...


class PrefillGraphs:
    """Graphs of steps with chunks of up to ``config.prefill_buckets[-1]`` tokens, on every rank or on none.

    ``warm_up`` once, before the first step. Without buckets, and where some rank's attention cannot be captured,
    ``buckets`` stays empty.
    """

    def __init__(self, parts: RoleParts, work: PrefillWork) -> None:
        self._device = parts.device
        self._work = work
        self._tables = parts.tables
        self._staging = parts.staging
        self._ring = parts.ring
        self._config = parts.config
        self._model = parts.model
        self._graphs: dict[int, Graph] = {}
        self._split_graphs: dict[int, Graph] = {}
        self._attention: RepeatedPrefill | None = None
        self._proposing, self._passing, self._drawing = map(parts.part_range, ("propose", "forward", "tail"))

    @cached_property
    def tails(self) -> RowGraphs:
        """The second halves, in every kind of sampling that was asked for so far."""
        emitting_R = self._staging.padded_chunks(self._staging.max_rows).emitting_R
        row_maps = {bucket: emitting_R[:bucket] for bucket in self._config.decode_buckets}
        return RowGraphs("tail", self._device, self._tail, self._ring, row_maps, width=self._work.width)

    @cached_property
    def proposals(self) -> RowGraphs:
        """What comes before the forward pass, by rows that decode. Which ones is read where the tails' row map lies."""

        def propose(rows_B: Tensor, variant: SamplingVariant, exchange_rows: int) -> None:
            self._work.propose(len(rows_B), variant)

        return RowGraphs("proposal", self._device, propose, None, self.tails.row_maps)

    def trials(self, bucket: int, variant: SamplingVariant) -> list[Trial]:
        """Of proposals and tails, which are captured as they are needed; of nothing where no step with chunks is
        captured. Behind the warm-up: tails read what forward passes hand over."""
        if not self.buckets:
            return []
        tail = self.tails.rehearsal(bucket, variant)
        if not self._work.proposes:
            return [tail]
        return [self.proposals.rehearsal(bucket, self._work.guessed_by(variant)), tail]

    @property
    def row_graphs(self) -> list[RowGraphs]:
        """Those that may be captured late."""
        return [self.tails, self.proposals] if self._work.proposes else [self.tails]

    @property
    def _wanted(self) -> list[int]:
        """Token counts that are to be captured: those with room for a row that decodes."""
        return [bucket for bucket in self._config.prefill_buckets if bucket >= self._work.row_tokens]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts that are captured, ascending."""
        return tuple(sorted(self._graphs))

    @property
    def split_buckets(self) -> tuple[int, ...]:
        """Those of them that are captured with split keys, too."""
        return tuple(sorted(self._split_graphs))

    @property
    def captured(self) -> int:
        return len(self._graphs) + len(self._split_graphs)

    def launch(self, spec: LaunchSpec) -> None:
        """Put a step, whose chunks are staged and padded to ``spec.captured``, on the compute stream."""
        if spec.shape.proposing:
            with self._proposing:
                self.proposals.get(spec.shape.proposing, self._work.guessed_by(spec.shape.variant)).replay()
        with self._passing:
            if spec.shape.split_keys:
                self._split_graphs[spec.captured].replay()
            else:
                self._replay(spec)
        self._work.copy_forked(spec)
        with self._drawing:
            self.tails.get(spec.shape.rows, spec.shape.variant).replay()

    def _replay(self, spec: LaunchSpec) -> None:
        attention = self._attention
        assert attention is not None  # or there would be no bucket
        if attention.table is None:
            self._plan(attention, Lengths.of(spec.plan))
        self._graphs[spec.captured].replay()

    def _plan(self, attention: RepeatedPrefill, lengths: Lengths) -> None:
        self._device.compute.submit(lambda: attention.plan(*lengths))

    def _tail(self, emitting_B: Tensor, variant: SamplingVariant, exchange_rows: int) -> None:
        drawing = len(emitting_B) * self._work.row_tokens
        features_XF = None if self._features_XF is None else self._features_XF[:drawing]
        self._work.finish(self._hidden_XN[:drawing], features_XF, emitting_B, variant)

    def warm_up(self) -> None:
        """Capture every bucket, the largest first so that the shared memory pool is sized once, and replay that one.

        CaptureError names the bucket and the way out.
        """
        if not self._prepared:
            return
        began = time.perf_counter()
        self._device.release_unused()  # of the rehearsals before: the graphs' pool takes its place
        largest = self._wanted[-1]
        for bucket, split_keys in self._passes:
            graphs = self._split_graphs if split_keys else self._graphs
            graphs[bucket] = self._capture(bucket, split_keys)
        if self._work.proposes:
            self.proposals.warm_up(self._guessed_by)
        self.tails.warm_up(self._config.warm_variants)
        self._device.release_unused()  # of the rehearsals here
        self.rehearse(largest)
        self.tails.get(self._config.decode_buckets[-1], GREEDY).replay()
        self._device.compute.submit(self._ring.undo)  # what the replay reports is nobody's
        log.info(
            "graphs: %d of %s steps of up to %d tokens captured in %.1f s",
            self.captured,
            self._work.name,
            largest,
            time.perf_counter() - began,
        )

    def rehearse(self, bucket: int) -> None:
        """Run the forward pass of a captured number of tokens over padding; nothing is reported."""
        assert self._attention is not None  # or there would be no bucket
        self._plan(self._attention, self.rows_of(bucket))
        self._graphs[bucket].replay()

    def rehearsals(self) -> list[Callable[[], None]]:
        """What is captured, uncaptured, over padding and with a layer of each kind: what compiles its kernels."""
        if not self._prepared:
            return []
        passes = [partial(self._rehearse_pass, *one) for one in self._passes]
        guesses = self.proposals.rehearsals(self._guessed_by) if self._work.proposes else []
        return [*passes, *guesses, *self.tails.rehearsals(self._config.warm_variants)]

    @property
    def _guessed_by(self) -> tuple[SamplingVariant, ...]:
        """Variants in which proposals are captured."""
        guessed_by = map(self._work.guessed_by, self._config.warm_variants)
        return tuple(dict.fromkeys((GREEDY, *guessed_by)))

    @cached_property
    def _passes(self) -> list[tuple[int, bool]]:
        """The forward passes that are captured, in that order: of how many tokens, and whether with split keys."""
        largest_first = self._wanted[::-1]
        passes = [(bucket, False) for bucket in largest_first]
        if self._config.agree_min(int(self._work.splits_keys)):
            passes += [(bucket, True) for bucket in largest_first if bucket <= MOST_SPLIT_TOKENS]
        return passes

    @cached_property
    def _prepared(self) -> bool:
        """Whether anything is captured. Made when it is first asked: what all graphs share."""
        buckets = self._wanted
        if not buckets:
            return False
        rows = self._staging.max_rows
        self._page_table_BP = self._device.zeros(rows, self._tables.max_blocks, dtype=torch.int32)
        attention = self._work.attention_for_graphs(self._page_table_BP, buckets[-1])
        if not self._config.agree_min(int(attention is not None)):
            return False  # one rank that pads and one that does not would exchange all-reduces of unlike sizes
        self._attention = attention
        if attention is not None and (table := attention.table) is not None:
            self._stage_plans(table)
        drawing, size = rows * self._work.row_tokens, self._work.feature_size
        self._hidden_XN = self._device.zeros(drawing, self._model.config.hidden_size, dtype=self._model.dtype)
        self._features_XF = self._device.zeros(drawing, size, dtype=self._model.dtype) if size else None
        return True

    def _stage_plans(self, table: PlanTable) -> None:
        def planned(spec: LaunchSpec) -> npt.NDArray[np.int32] | None:
            if not spec.captured or spec.shape.split_keys:
                return None
            return table.entries(*Lengths.of(spec.plan), tokens=spec.captured)

        self._staging.bring_attention_plans(self._work.name, planned, table.place)

    def _capture(self, bucket: int, split_keys: bool) -> Graph:
        work = self._work
        try:
            return self._device.capture(
                partial(self._pass, bucket, split_keys),
                name=f"{work.name} of {bucket} tokens",
                warmup=partial(self._rehearse_pass, bucket, split_keys),
                warmups=1,
            )
        except DeviceError as error:
            raise CaptureError(
                f"capturing the {work.name} graph of {bucket} tokens failed: {error}. If memory ran out, lower "
                "--memory-fraction or --max-num-batched-tokens; --no-prefill-graphs does without these graphs"
            ) from error

    def _rehearse_pass(self, bucket: int, split_keys: bool) -> None:
        """Nothing is staged yet: every token is the padding slot's."""
        assert self._attention is not None  # or there would be no bucket
        self._attention.plan(*self.rows_of(bucket))
        with self._model.few_layers():
            self._pass(bucket, split_keys)

    def _pass(self, bucket: int, split_keys: bool) -> None:
        """The forward pass of what is staged, of ``bucket`` tokens; graph-safe."""
        read = PrefillAttention(self._page_table_BP, (bucket,), (bucket,), self._attention)
        grouped = bool(self._config.exchanges)  # some groups may decode while others have chunks, mixed or not
        mixed, exchange_rows = self._config.mixed or grouped, bucket if grouped else 0
        chunks = self._staging.padded_chunks(bucket)
        rows = len(chunks.slots_R)
        self._page_table_BP[:rows].copy_(self._tables.gather_blocks(chunks.slots_R))
        hidden_XN, features_XF = self._work.hidden(
            chunks, read, exchange_rows, mixed=mixed, split_keys=split_keys, captured=True
        )
        self._hidden_XN[: len(hidden_XN)].copy_(hidden_XN)
        if self._features_XF is not None and features_XF is not None:
            self._features_XF[: len(features_XF)].copy_(features_XF)

    def rows_of(self, tokens: int) -> Lengths:
        """Rows that so many tokens fill; those past the last row of the page table are left out."""
        longest = self._config.limits.max_model_len
        whole, rest = divmod(tokens, longest)
        lengths = ((longest,) * whole + ((rest,) if rest else ()))[: len(self._page_table_BP)]
        return Lengths(lengths, lengths)


def prefill_buckets(most: int) -> tuple[int, ...]:
    """32, 64, then four to each doubling up to 1024 and eight beyond; the last is ``most`` itself."""
    return token_ladder(most)
