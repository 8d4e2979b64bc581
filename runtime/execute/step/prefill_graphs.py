"""One captured graph a token bucket: a prefill step is one launch up to its hidden states, and a few after them.

Knows: which token counts are captured, and what every replay reads anew: staged chunks, page tables, the plan of
attention. Does not know: what a step computes (step.py), or which steps are prefill (runtime/schedule).

Launched kernel by kernel, a prefill step costs the host tens of milliseconds, whatever its size: more than the device
needs for a short prompt. A step's tokens are filled up to a bucket with tokens of the padding slot. What depends on the
kind of sampling is launched after the replay: graphs for all would be many. Steps that score prompt tokens have none:
they need the last layer of all tokens, the others of one a row.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch

from models.inputs import PrefillAttention, RepeatedPrefill
from runtime.execute.device.protocol import Device, DeviceError, Graph
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.slot_state import SlotTables
from runtime.execute.staging import Chunks, Staging
from runtime.execute.step.decode_graphs import CaptureError
from runtime.execute.step.step import StepWork
from runtime.schedule.plan import StepKind, StepPlan

log = logging.getLogger(__name__)


class PrefillGraphs:
    """Graphs of prefill steps of up to ``buckets[-1]`` tokens, on every rank or on none (``agree_min``).

    ``warm_up`` once, before the first step; without it, without buckets, and where attention cannot be captured,
    ``bucket`` is 0 for every plan.
    """

    def __init__(
        self,
        device: Device,
        work: StepWork,
        tables: SlotTables,
        staging: Staging,
        buckets: tuple[int, ...],
        agree_min: Callable[[int], int] = int,
    ) -> None:
        self._device = device
        self._work = work
        self._tables = tables
        self._staging = staging
        self._buckets = buckets
        self._graphs: dict[int, Graph] = {}
        self._attention: RepeatedPrefill | None = None
        if not buckets:
            return
        self._page_table_BP = device.zeros(staging.max_rows, tables.max_blocks, dtype=torch.int32)
        attention = work.repeat_prefill(self._page_table_BP, buckets[-1])
        if agree_min(int(attention is not None)):  # one that pads and one that does not would exchange unlike sums
            self._attention = attention
            self._hidden_RN = work.empty_hidden(device, staging.max_rows)

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def bucket(self, plan: StepPlan) -> int:
        """Tokens to which the step's are filled up for its graph; 0 where it has none."""
        if plan.kind is not StepKind.PREFILL or not self._graphs or plan.scored_tokens:
            return 0
        tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        return self._buckets[bisect_left(self._buckets, tokens)] if tokens <= self._buckets[-1] else 0

    def launch(
        self,
        bucket: int,
        chunks: Chunks,
        query_lengths: tuple[int, ...],
        kv_lengths: tuple[int, ...],
        features: SamplingVariant,
    ) -> None:
        """Put a prefill step whose chunks are staged, and padded to ``bucket``, on the compute stream.

        Arguments as those of StepWork.prefill.
        """
        attention, compute = self._attention, self._device.compute
        assert attention is not None  # bucket() was not 0
        hidden_RN = self._hidden_RN[: len(chunks.slots_R)]  # those past the plan's rows are of no row
        compute.submit(lambda: attention.plan(query_lengths, kv_lengths))
        self._graphs[bucket].replay()
        compute.submit(lambda: self._work.finish_prefill(hidden_RN, chunks, features))

    def warm_up(self, max_model_len: int, undo: Callable[[], None]) -> None:
        """Capture every bucket, the largest first so that the shared memory pool is sized once, and replay that one.

        ``undo`` takes back what the replay reports. CaptureError names the bucket and the way out.
        """
        if self._attention is None:
            return
        began = time.perf_counter()
        self._device.release_unused()  # of the rehearsals before: the graphs' pool takes its place
        for bucket in reversed(self._buckets):
            self._graphs[bucket] = self._capture(bucket, max_model_len)
        self._device.release_unused()  # of the rehearsals here
        largest = self._buckets[-1]
        chunks, lengths = self._staging.padded_chunks(largest), self._rows_of(largest, max_model_len)
        self.launch(largest, chunks, lengths, lengths, SamplingVariant())
        self._device.compute.submit(undo)
        log.info(
            "graphs: %d of prefill steps of up to %d tokens captured in %.1f s",
            len(self._graphs),
            self._buckets[-1],
            time.perf_counter() - began,
        )

    def _capture(self, bucket: int, max_model_len: int) -> Graph:
        work, attention = self._work, self._attention
        assert attention is not None  # or warm_up() had returned
        read = PrefillAttention(self._page_table_BP, (bucket,), (bucket,), attention)
        lengths = self._rows_of(bucket, max_model_len)

        def forward() -> None:
            chunks = self._staging.padded_chunks(bucket)
            rows = len(chunks.slots_R)
            self._page_table_BP[:rows].copy_(self._tables.gather_blocks(chunks.slots_R))
            self._hidden_RN[:rows].copy_(work.prefill_hidden(chunks, read))

        def rehearse() -> None:  # nothing is staged yet: every token is the padding slot's
            attention.plan(lengths, lengths)
            forward()

        try:
            return self._device.capture(forward, name=f"prefill of {bucket} tokens", warmup=rehearse, warmups=1)
        except DeviceError as error:
            raise CaptureError(
                f"capturing the prefill graph of {bucket} tokens failed: {error}. If memory ran out, lower "
                "--memory-fraction or --max-num-batched-tokens; --no-prefill-graphs does without these graphs"
            ) from error

    def _rows_of(self, tokens: int, longest: int) -> tuple[int, ...]:
        """Lengths of the rows that so many tokens fill, none over ``longest``; those past the last row are left out."""
        whole, rest = divmod(tokens, longest)
        return ((longest,) * whole + ((rest,) if rest else ()))[: len(self._page_table_BP)]


def prefill_buckets(most: int) -> tuple[int, ...]:
    """32, 64, then four to each doubling up to 1024 and eight beyond; the last is ``most`` itself."""
    ladder = [32, 64]
    while ladder[-1] < most:
        below = 1 << (ladder[-1].bit_length() - 1)
        ladder.append(ladder[-1] + below // (4 if below < 1024 else 8))
    return (*(tokens for tokens in ladder if tokens < most), most)
