"""One captured graph a token bucket: a prefill step is one launch up to its hidden states, and a few after them.

Knows: which token counts are captured, and what every replay reads anew: staged chunks, page tables, the plan of
attention. Does not know: what a step computes (prefill.py), or which steps are replayed (launch_spec.py).

Launched kernel by kernel, a prefill step costs the host tens of milliseconds, whatever its size: more than the device
needs for a short prompt. A step's tokens are filled up to a bucket with tokens of the padding slot. What depends on the
kind of sampling is launched after the replay: graphs for all would be many. Steps that score prompt tokens have none:
they need the last layer of all tokens, the others of one a row.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import torch
from torch import Tensor

from models.inputs import PrefillAttention, RepeatedPrefill
from runtime.execute.device.protocol import DeviceError, Graph
from runtime.execute.role import RoleParts
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.staging import Chunks
from runtime.execute.step.row_graphs import CaptureError

log = logging.getLogger(__name__)


class PrefillWork(Protocol):
    """What is captured, and what follows each replay: prefill.py's PrefillRole."""

    def hidden(self, chunks: Chunks, attention: PrefillAttention) -> Tensor: ...
    def finish(self, hidden_RN: Tensor, chunks: Chunks, variant: SamplingVariant) -> None: ...
    def attention_for_graphs(self, page_table_BP: Tensor, max_tokens: int) -> RepeatedPrefill | None: ...


class PrefillGraphs:
    """Graphs of prefill steps of up to ``limits.prefill_buckets[-1]`` tokens, on every rank or on none.

    ``warm_up`` once, before the first step. Without buckets, and where some rank's attention cannot be captured,
    ``buckets`` stays empty.
    """

    def __init__(self, parts: RoleParts, work: PrefillWork) -> None:
        self._device = parts.device
        self._work = work
        self._tables = parts.tables
        self._staging = parts.staging
        self._ring = parts.ring
        self._limits = parts.limits
        self._model = parts.model
        self._graphs: dict[int, Graph] = {}
        self._attention: RepeatedPrefill | None = None

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts that are captured, ascending."""
        return tuple(sorted(self._graphs))

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def launch(
        self,
        bucket: int,
        chunks: Chunks,
        query_lengths: tuple[int, ...],
        kv_lengths: tuple[int, ...],
        variant: SamplingVariant,
    ) -> None:
        """Put a prefill step whose chunks are staged, and padded to ``bucket``, on the compute stream.

        Arguments as those of PrefillRole.prefill.
        """
        attention, compute = self._attention, self._device.compute
        assert attention is not None  # or there would be no bucket
        hidden_RN = self._hidden_RN[: len(chunks.slots_R)]  # those past the plan's rows are of no row
        compute.submit(lambda: attention.plan(query_lengths, kv_lengths))
        self._graphs[bucket].replay()
        compute.submit(lambda: self._work.finish(hidden_RN, chunks, variant))

    def warm_up(self) -> None:
        """Capture every bucket, the largest first so that the shared memory pool is sized once, and replay that one.

        CaptureError names the bucket and the way out.
        """
        if not self._prepared():
            return
        began = time.perf_counter()
        self._device.release_unused()  # of the rehearsals before: the graphs' pool takes its place
        largest = self._limits.prefill_buckets[-1]
        for bucket in reversed(self._limits.prefill_buckets):
            self._graphs[bucket] = self._capture(bucket)
        self._device.release_unused()  # of the rehearsals here
        chunks, lengths = self._staging.padded_chunks(largest), self._rows_of(largest)
        self.launch(largest, chunks, lengths, lengths, SamplingVariant())
        self._device.compute.submit(self._ring.undo)  # what the replay reports is nobody's
        log.info(
            "graphs: %d of prefill steps of up to %d tokens captured in %.1f s",
            len(self._graphs),
            largest,
            time.perf_counter() - began,
        )

    def _prepared(self) -> bool:
        """Make what all graphs share; False where nothing is to be captured."""
        buckets = self._limits.prefill_buckets
        if not buckets:
            return False
        rows = self._staging.max_rows
        self._page_table_BP = self._device.zeros(rows, self._tables.max_blocks, dtype=torch.int32)
        attention = self._work.attention_for_graphs(self._page_table_BP, buckets[-1])
        if not self._limits.agree_min(int(attention is not None)):
            return False  # one rank that pads and one that does not would exchange all-reduces of unlike sizes
        self._attention = attention
        self._hidden_RN = self._device.zeros(rows, self._model.config.hidden_size, dtype=self._model.dtype)
        return True

    def _capture(self, bucket: int) -> Graph:
        work, attention = self._work, self._attention
        assert attention is not None  # or warm_up() had returned
        read = PrefillAttention(self._page_table_BP, (bucket,), (bucket,), attention)
        lengths = self._rows_of(bucket)

        def forward() -> None:
            chunks = self._staging.padded_chunks(bucket)
            rows = len(chunks.slots_R)
            self._page_table_BP[:rows].copy_(self._tables.gather_blocks(chunks.slots_R))
            self._hidden_RN[:rows].copy_(work.hidden(chunks, read))

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

    def _rows_of(self, tokens: int) -> tuple[int, ...]:
        """Lengths of the rows that so many tokens fill; those past the last row of the page table are left out."""
        longest = self._limits.max_model_len
        whole, rest = divmod(tokens, longest)
        return ((longest,) * whole + ((rest,) if rest else ()))[: len(self._page_table_BP)]


def prefill_buckets(most: int) -> tuple[int, ...]:
    """32, 64, then four to each doubling up to 1024 and eight beyond; the last is ``most`` itself."""
    ladder = [32, 64]
    while ladder[-1] < most:
        below = 1 << (ladder[-1].bit_length() - 1)
        ladder.append(ladder[-1] + below // (4 if below < 1024 else 8))
    return (*(tokens for tokens in ladder if tokens < most), most)
