"""The executor: launches plans on this rank's device and hands their results back.

Knows: the path of a step (stage, apply, run, send home) and how everything on the device is sized and warmed up.
Does not know: why a plan is what it is (runtime/schedule), other ranks' plans, requests' text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.layers.decoder import Decoder
from runtime.execute.cache.kv_pool import KvPool, KvShape, KvSizing, size_kv
from runtime.execute.device.protocol import Device
from runtime.execute.landing import ResultReader, ResultRing, StepTiming
from runtime.execute.sampling.inputs import MAX_TOP_LOGPROBS, SamplingVariant
from runtime.execute.sampling.prompt_logprobs import PromptLogprobRing, StepPromptLogprobs
from runtime.execute.slot_state import PADDING_SLOT, SlotTables
from runtime.execute.staging import Chunks, Staging
from runtime.execute.step.decode_graphs import DecodeGraphs
from runtime.execute.step.prefill_graphs import PrefillGraphs
from runtime.execute.step.step import StepWork
from runtime.schedule.plan import Chunk, StepKind, StepPlan, StepResult

log = logging.getLogger(__name__)

SEEN_TOKENS_SHARE = 0.02  # of device memory: larger tables of seen tokens wait for the first penalised request
CPU_KV_BYTES = 2 << 30  # a CPU's memory is shared with everything else: no more than this unless --num-blocks says so


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What memory and graphs are sized for. ``agree_min`` returns the least of a number over all ranks.

    ``share(make)`` returns what ``make()`` returned on rank 0, on every rank; without it no kernel is chosen by
    measurement. ``kernel_cache``: folder in which those choices are kept. ``exchanges``: row counts, ascending, of
    exchanges with other groups while one of them prefills; empty where there is one group. ``prefill_buckets``: token
    counts, ascending, of prefill steps that are captured (prefill_graphs.py); none where it is empty.
    """

    rows: int
    slots: int
    block_size: int
    max_model_len: int
    depth: int
    width: int
    max_prefill_tokens: int
    decode_buckets: tuple[int, ...]
    memory_fraction: float
    num_blocks: int | None
    agree_min: Callable[[int], int]
    warm_variants: tuple[SamplingVariant, ...] = (SamplingVariant(),)
    exchanges: tuple[int, ...] = ()
    prefill_buckets: tuple[int, ...] = ()
    share: Callable[[Callable[[], str]], str] | None = None
    kernel_cache: Path | None = None


class Executor:
    """One rank's device side. ``launch`` never blocks; ``take`` blocks until that step's result is on the host."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        limits: ExecutorLimits,
        *,
        on_timing: Callable[[StepTiming], None] | None = None,
        stage_range: AbstractContextManager[object] | None = None,
    ) -> None:
        self.device = device
        self._stage_range = stage_range or nullcontext()
        self._limits = limits
        self._model = model
        max_rows = max(limits.rows, limits.decode_buckets[-1])
        self.tables = SlotTables(
            device,
            max_requests=limits.slots,
            max_blocks=-(-(limits.max_model_len + limits.width) // limits.block_size),
            vocab_size=model.config.vocab_size,
            seen_bytes=int(device.memory_info().total * SEEN_TOKENS_SHARE),
        )
        self.staging = Staging(device, self.tables, max_prefill_tokens=limits.max_prefill_tokens, max_rows=max_rows)
        self._ring = ResultRing(
            device, entries=limits.depth + 3, rows=max_rows, width=limits.width, max_logprobs=MAX_TOP_LOGPROBS
        )
        geometry = model.kv_geometry
        shape = KvShape(geometry.layers, limits.block_size, geometry.kv_heads, geometry.head_dim, geometry.dtype)
        self.sizing = self._size(shape)
        self.pool = KvPool(device, shape, self.sizing.num_blocks)
        self._work = self._work_over(self.pool.layers)
        maps = {bucket: self.staging.row_map(bucket) for bucket in limits.decode_buckets}
        self.graphs = DecodeGraphs(device, self._work, self._ring, maps)
        self.graphs.warm_up(limits.warm_variants, limits.exchanges)
        self.prefill_graphs = PrefillGraphs(
            device, self._work, self.tables, self.staging, limits.prefill_buckets, limits.agree_min
        )
        self.prefill_graphs.warm_up(limits.max_model_len, self._ring.undo)
        self.prompt_scores = PromptLogprobRing(device, entries=self._ring.entries, max_tokens=limits.max_prefill_tokens)
        self.landing = ResultReader(device, self._ring, on_timing=on_timing, prompt_scores=self.prompt_scores)
        self.allocations_at_warmup = device.allocations()
        self._slot_features: list[SamplingVariant] = [SamplingVariant()] * (limits.slots + 1)
        self._row_features = SamplingVariant()
        self._features_of: tuple[int, ...] | None = None

    @property
    def prefill_attention(self) -> str:
        """Whose kernel it is, for records of measurements."""
        return self._model.kernels.prefill_name

    # ---- each step ----

    def launch(self, plan: StepPlan, features: SamplingVariant | None = None) -> None:
        """Put one step on the device, behind everything launched before it.

        ``features`` cover at least those of the plan's rows, which are the default.
        """
        compute = self.device.compute
        features = features or self.features(plan)
        ticket = self.landing.reserve(plan, logprobs=features.top_logprobs if features.logprobs else None)
        padded_tokens = self.prefill_graphs.bucket(plan)
        with self._stage_range:
            staged = self.staging.stage(plan, padded_tokens)
        compute.record(ticket.start)
        if staged is not None:
            self.staging.apply(staged)
        if plan.kind is StepKind.DECODE:
            self.graphs.get(plan.bucket, features, plan.exchange_rows).replay()
        else:
            self._launch_prefill(plan, features, ticket.scores, padded_tokens)
        compute.record(ticket.ready)
        self.landing.submit(ticket)

    def _launch_prefill(
        self, plan: StepPlan, features: SamplingVariant, scores: StepPromptLogprobs | None, padded_tokens: int
    ) -> None:
        chunks, exchange_rows = self.staging.chunks(plan), plan.exchange_rows
        query = tuple(len(chunk.token_ids) for chunk in plan.chunks)
        known = tuple(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)
        if padded_tokens:
            self.prefill_graphs.launch(padded_tokens, chunks, query, known, features)
        else:
            self.device.compute.submit(
                lambda: self._work.prefill(chunks, query, known, features, scores, exchange_rows)
            )

    def take(self, plan: StepPlan) -> StepResult:
        """The result of a launched step, oldest first."""
        return self.landing.take(plan.step)

    def close(self) -> None:
        """Finish what is in flight and release threads and graphs."""
        try:
            self.landing.close()
        finally:
            self.device.close()

    def features(self, plan: StepPlan) -> SamplingVariant:
        """The sampling variant that serves every row; worked out again only when the rows changed. Once a plan."""
        for write in plan.slot_writes:
            self._slot_features[write.slot] = SamplingVariant.covering([write.sampling])
        if plan.slots is not self._features_of:
            self._features_of = plan.slots
            self._row_features = SamplingVariant()
            for slot in plan.slots:
                self._row_features |= self._slot_features[slot]
        return self._row_features

    # ---- before the first step ----

    def _work_over(self, layers: list[Tensor]) -> StepWork:
        return StepWork(self._model, layers, self.tables, self._ring, self._limits.block_size)

    def _size(self, shape: KvShape) -> KvSizing:
        """Run the largest prefill and decode over padding, measure them, and divide what is left by the block size."""
        limits = self._limits
        scratch = KvPool(self.device, shape, 0)  # the trash block is all that padding rows touch
        work = self._work_over(scratch.layers)
        # Decode first: its kernels compile here while those of prefill may be loading (Kernels.agree_on_kernels).
        decode_peak = self.device.peak_of(lambda: self._rehearse_decode(work))
        self._model.kernels.agree_on_kernels(limits.agree_min)
        prefill_peak = self.device.peak_of(lambda: self._rehearse_prefill(work, limits.max_prefill_tokens))
        peak = max(decode_peak, prefill_peak)
        self._tune()
        if self.device.torch_device.type != "cpu":
            for tokens in shorter_prefills(limits.max_prefill_tokens):
                self._rehearse_prefill(work, tokens)
        num_blocks = limits.num_blocks
        if num_blocks is None and self.device.torch_device.type == "cpu":
            all_rows = limits.slots * self.tables.max_blocks
            num_blocks = min(all_rows, CPU_KV_BYTES // shape.block_bytes)
        sizing = size_kv(
            self.device.memory_info(),
            peak,
            shape,
            max_model_len=limits.max_model_len,
            reserve_tokens=(limits.depth + 1) * limits.width,
            memory_fraction=limits.memory_fraction,
            num_blocks=num_blocks,
        )
        sizing = sizing.with_blocks(limits.agree_min(sizing.num_blocks))
        log.info("%s", sizing)
        return sizing

    def _tune(self) -> None:
        """Choose kernels for what was rehearsed, while there is room for copies of weights."""
        if self._limits.share is None:
            return
        began = time.perf_counter()
        measured = self._model.kernels.tune_seen(self._limits.kernel_cache, self._limits.share)
        if measured:
            log.info("kernels of %d products chosen by measurement in %.1f s", measured, time.perf_counter() - began)

    def _rehearse_prefill(self, work: StepWork, tokens: int) -> None:
        """So many tokens on the padding slot: nothing but the trash block is written."""
        limits = self._limits
        lengths: list[int] = []
        left = tokens
        while left and len(lengths) < limits.rows:
            lengths.append(min(left, limits.max_model_len))
            left -= lengths[-1]
        chunks = tuple(Chunk(PADDING_SLOT, 0, (0,) * length, True) for length in lengths)
        rows = limits.exchanges[-1] if limits.exchanges else 0
        known = tuple(lengths)
        work.prefill(_padding_chunks(chunks, self.device.torch_device), known, known, GREEDY, exchange_rows=rows)
        self._ring.undo()

    def _rehearse_decode(self, work: StepWork) -> None:
        """Every bucket, the largest first; on a CPU, where nothing is compiled, only that one."""
        device, buckets = self.device.torch_device, self._limits.decode_buckets[::-1]
        for bucket in buckets[:1] if device.type == "cpu" else buckets:
            work.decode(torch.zeros(bucket, dtype=torch.int64, device=device), GREEDY)
            self._ring.undo()


GREEDY = SamplingVariant()


def shorter_prefills(most: int) -> Iterator[int]:
    """Tokens of prefills that are rehearsed besides the one of ``most``, so that no request waits for a compiler.

    Kernels are chosen and compiled by ranges of sizes, each of which is twice as long as it begins, or longer.
    """
    tokens = min(most // 2, 2048)
    while tokens >= 32:
        yield tokens
        tokens //= 2


def _padding_chunks(chunks: tuple[Chunk, ...], device: torch.device) -> Chunks:
    """Chunks on the device as staging would lay them out, without staging."""
    positions = torch.cat([torch.arange(len(chunk.token_ids), device=device) for chunk in chunks])
    ends = torch.tensor([len(chunk.token_ids) for chunk in chunks]).cumsum(0) - 1
    rows = torch.zeros(len(chunks), dtype=torch.int64, device=device)
    padding = torch.zeros_like(positions)
    return Chunks(padding, positions, padding, rows, rows, ends.to(device))
