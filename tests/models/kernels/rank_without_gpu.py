"""A rank's steps over NVIDIA's kernels without a GPU: tensors on torch's meta device, an H200 that is played.

Knows: what a run launches (whole decode and prefill steps, every kind of sampling), and what the wrappers ask about the
device. Does not know: what happens at a launch (compiling_driver.py). Prefill attention is ours;
cuBLAS's kernels are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from models.drafters.draft_head import DraftHead
from models.inputs import DecodeAttention
from models.kernels.matmul.choice_table import ChoiceTable, Gemv, LinearShape, Skinny, Wide
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.ops import nvidia, tuned
from models.registry import config_from_folder, model_class
from models.row_buckets import decode_ladder
from models.weights import without_memory
from parallel.comm.collectives import Collectives, PendingAllReduce
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.quantised import Quantised
from parallel.comm.symmetric_all_reduce import AllReduceDispatch, AllReduceKernel, buffer_rows
from parallel.layers.experts import ExpertSplit
from parallel.layers.weight import Weight
from runtime.config import DEVICE_DEFAULTS
from runtime.execute.cache.pool import CachePool
from runtime.execute.proposer import Observed, Proposed, Proposer, ProposerParts
from runtime.execute.result_ring import ResultRing
from runtime.execute.sampling import logit_edits, logprobs, penalties, rejection, sampler, token_tables
from runtime.execute.sampling.inputs import TOP_LOGPROBS, SamplingVariant
from runtime.execute.sampling.kernels import triton_kernels
from runtime.execute.sampling.logprobs import StepPromptLogprobs, score_words
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.execute.staging import Chunks
from runtime.execute.step.memory import ExecutorConfig, StepParts
from runtime.execute.step.packed_pass import Lengths
from runtime.execute.step.step_io_kernels import triton_kernels as step_kernels
from runtime.schedule.config import StepLimits
from runtime.speculate import guesses
from runtime.speculate.draft_kernels import triton_kernels as draft_kernels
from runtime.speculate.guesses import Drafter, Guesses, ProbabilisticProposer
from runtime.speculate.tree import TreeProposer
from tests.models.kernels.compiling_driver import CAPABILITY, MULTIPROCESSORS, CompilingDriver
from tests.models.kernels.nvidia_kernels import invariant_nvidia_kernels, nvidia_kernels
from tests.plant import Kernels, make_decode_step, make_prefill_step, make_window_step, plant

META = torch.device("meta")
SHAPES = Path(__file__).parents[3] / "models/shapes"
BUCKETS = decode_ladder(DEVICE_DEFAULTS["max_num_seqs"]["cuda"])
PAGE = DEVICE_DEFAULTS["block_size"]["cuda"]
MOST_PREFILL = DEVICE_DEFAULTS["max_prefill_tokens"]["cuda"]
GREEDY = SamplingVariant()
BOUNDED = SamplingVariant(random=True, filters=True)  # ranks exchange candidates
EDITED = SamplingVariant(random=True, penalties=True, min_tokens=True, edits=True, biases=True)
_ALL = SamplingVariant(random=True, filters=True, penalties=True, min_tokens=True)
SAMPLING = (
    SamplingVariant(random=True),
    BOUNDED,
    dataclasses.replace(BOUNDED, unbounded=True),
    SamplingVariant(random=True, penalties=True),
    SamplingVariant(min_tokens=True),
    EDITED,
    dataclasses.replace(EDITED, penalties=False, min_tokens=False),
    SamplingVariant(random=True, edits=True),
    SamplingVariant(edits=True, grammars=True),
    SamplingVariant(random=True, filters=True, edits=True, grammars=True),
    _ALL,
    dataclasses.replace(_ALL, unbounded=True),
    *(dataclasses.replace(_ALL, logprobs=True, top_logprobs=top) for top in TOP_LOGPROBS),
)


def play_an_h200(capability: tuple[int, int] = CAPABILITY) -> None:
    """What the wrappers ask torch, FlashInfer and cuBLASLt about the device is answered as on an H200, but for its
    ``capability``. For good."""
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda device=None: capability
    cuda.get_device_name = lambda device=None: "NVIDIA H200"
    cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    modules: tuple[Any, ...] = (nvidia, tuned, sampler, logprobs, logit_edits, penalties, token_tables, rejection)
    for module in modules[:2]:
        module.CublasLtLinear = _NoCublasLt
        module.unsupported = lambda device: None
    for module in modules[2:]:
        module.kernels_for = lambda tensor: triton_kernels()
    of_drafts: Any = guesses
    of_drafts.sampling_kernels, of_drafts.kernels_for = modules[2].kernels_for, lambda tensor: draft_kernels()
    plant(pytest.MonkeyPatch(), lambda *_: step_kernels(), part="step.kernels")


class _NoCublasLt:
    """As cublaslt.Linear of the version that the shipped table was measured with."""

    version = 130100

    def __init__(self, device: torch.device) -> None:
        pass

    def algorithms(self, *shape: object, most: int = 16) -> list[str]:
        return []

    def can_run(self, *shape: object) -> bool:
        return True

    def run(self, x_MK: Tensor, weight_OK: Tensor, algorithm: str, out_MO: Tensor | None = None) -> Tensor:
        return x_MK.new_empty(x_MK.shape[0], weight_OK.shape[0]) if out_MO is None else out_MO


class FirstRank(Collectives):
    """As symmetric collectives of ``size`` ranks, seen from the first, at addresses where nothing is."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        if size > 1:
            use_counts = torch.empty(buffer_rows(size), dtype=torch.int32, device=META)
            self.dispatch = AllReduceDispatch([(1 + rank) << 40 for rank in range(size)], use_counts, 0, pdl=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        kernel = self._kernel_for(x)
        return x if kernel is None else kernel(x)[0]

    def push_buffers(self, tokens: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        return self.dispatch.push_buffers(tokens, width, dtype) if self.size > 1 else None

    def all_reduce_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | PendingAllReduce:
        return x_TN if self._kernel_for(x_TN) is None else PendingAllReduce(x_TN, self, pushed)

    def all_reduce_norm(
        self,
        x_TN: Tensor,
        residual_TN: Tensor | None,
        norm_N: Tensor,
        eps: float,
        *,
        pushed: bool = False,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:
        kernel = self.dispatch.pushed if pushed else self._kernel_for(x_TN)
        assert kernel is not None
        return kernel(x_TN, residual_TN=residual_TN, norm_N=norm_N, eps=eps, into=into)

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else x.new_empty(*x.shape[:-1], x.shape[-1] * self.size)

    def all_gather_keys(self, keys_RX: Tensor, *, largest: bool = False) -> Tensor:
        gather = self.dispatch.gather_keys_for(keys_RX, largest) if self.size > 1 else None
        return super().all_gather_keys(keys_RX, largest=largest) if gather is None else gather(keys_RX, largest=largest)

    def _kernel_for(self, x: Tensor) -> AllReduceKernel | None:
        return self.dispatch.kernel_for(x) if self.size > 1 else None


class HeadAlone(Drafter):
    """A drafter without layers: the target's head, for all places at once."""

    name, reads_hidden = "head", False

    def __init__(self, parts: ProposerParts) -> None:
        self._model = model = parts.model
        self.head = DraftHead(model.logits, model.vocab_shard, model.collectives, None)
        self.tables = parts.tables

    def guess(self, rows_B: Tensor, columns: SlotColumns, count: int, guesses: Guesses) -> Proposed:
        shape = len(rows_B), count, self._model.config.hidden_size
        guesses.take(torch.zeros(shape, dtype=self._model.dtype, device=META))
        return guesses.proposed()

    def observe(self, observed: Observed) -> None:
        """It reads nothing."""


DRAFTS: dict[str, Callable[[ProposerParts], Proposer]] = {  # kinds of draft tokens
    "sampled": lambda parts: ProbabilisticProposer(parts.device, HeadAlone(parts)),
    "tree": lambda parts: TreeProposer(parts, HeadAlone(parts), 2),
}


class Rank:
    """The first rank of a group: a few layers of a shape (the first has no residual yet), its slots, and its steps."""

    def __init__(
        self,
        driver: CompilingDriver,
        shape: str,
        *,
        tp: int = 1,
        ep: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        same_bits: bool = False,
        layers: int = 2,
        drafts: str | None = None,
    ) -> None:
        config = config_from_folder(SHAPES / f"qwen3-{shape}")
        experts = config.experts and dataclasses.replace(config.experts, layers=tuple(range(layers)))
        config = dataclasses.replace(config, layers=layers, experts=experts)
        self._driver = driver
        self._name = f"{shape} {'ep' if ep else 'tp'}{tp} {str(dtype).removeprefix('torch.')}"
        self._name += f", cache {str(kv_dtype).removeprefix('torch.')}" if kv_dtype else ""
        self.kernels: Kernels = nvidia_kernels(META, prefill="triton")
        if same_bits:
            self._name = f"deterministic {self._name}"
            self.kernels = invariant_nvidia_kernels(META)
        build, split = model_class(config.architecture), ExpertSplit(whole=ep)
        self.model = without_memory(
            lambda plan: build(config, ModelContext(FirstRank(tp), self.kernels, dtype, split, kv_dtype, plan=plan)),
            config.quantization,
        )
        compute = SimpleNamespace(submit=_now, synchronize=_nothing)
        zeros = partial(torch.zeros, device=META)
        device = cast(Any, SimpleNamespace(torch_device=META, zeros=zeros, pinned=zeros, compute=compute))
        width, tree = (1 if drafts is None else 4), (8 if drafts == "tree" else 0)
        ring = ResultRing(device, entries=3, rows=BUCKETS[-1], width=width, reported=2 + 2 * TOP_LOGPROBS[-1])
        limits = StepLimits(
            BUCKETS[-1], 2 * BUCKETS[-1], block_size=PAGE, max_model_len=config.max_length, width=width, tree=tree
        )
        slots = SlotTables(
            device,
            max_requests=limits.slots,
            max_blocks=limits.max_blocks,
            vocab_size=config.vocab_size,
            history=0 if drafts is None else limits.max_model_len + width,
        )
        staging = cast(
            Any, SimpleNamespace(row_map=lambda role, rows: torch.zeros(rows, dtype=torch.int64, device=META))
        )
        pool = CachePool(device, block_size=PAGE, blocks=63, slots=1)
        caches = pool.allocate(self.model.cache_layout)
        self._kv = pool.paged
        sizes = ExecutorConfig(limits, BUCKETS, memory_fraction=0.9, num_blocks=63, agree_min=int)
        parts = StepParts(device, self.model, caches, pool, slots, ring, staging, sizes)
        if drafts is not None:
            parts = dataclasses.replace(
                parts, proposer=DRAFTS[drafts](ProposerParts(device, self.model, pool, slots, limits))
            )
        self._decode, self._prefill = make_decode_step(parts), make_prefill_step(parts)
        self.drafts = drafts is not None
        self._rows = [self._decode] if drafts is None else [self._decode, make_window_step(parts)]

    def decode(self, bucket: int, features: SamplingVariant = GREEDY) -> None:
        self._driver.where = f"{self._name}, decode x{bucket}, {features}"
        for step in self._rows:
            step.decode(torch.zeros(bucket, dtype=torch.int64, device=META), features)

    def compile_sampling(self) -> None:
        self._driver.where = f"{self._name}, sampling kernels"
        for step in self._rows:
            step.compile_sampling()

    def prefill(self, tokens: int, rows: int = 1, scored: int = 0) -> None:
        """``scored`` prompt tokens with their log-probabilities."""
        self._driver.where = f"{self._name}, prefill of {tokens}"
        tokens_3T, rows_4R, scored_2T = (
            torch.zeros(n, most, dtype=torch.int64, device=META)
            for n, most in ((3, MOST_PREFILL), (4, BUCKETS[-1]), (2, MOST_PREFILL))
        )
        columns: tuple[Any, ...] = (
            *tokens_3T[:, :tokens],
            *rows_4R[:, :rows],
            scored_2T[:, :scored] if scored else None,
        )
        chunks = Chunks(*columns)
        top = TOP_LOGPROBS[-1]
        words = torch.zeros(score_words(scored, top), dtype=torch.int32, device=META)
        scores = StepPromptLogprobs(Mock(), scored, top, words, words) if scored else None
        lengths = (tokens // rows,) * rows
        self._prefill.work.prefill(chunks, Lengths(lengths, lengths), GREEDY, scores)

    def several_queries(
        self, rows: int, query_len: int, *, tree: bool = False, absent: bool = False, codes: bool = False
    ) -> None:
        """Decode attention of ``query_len`` tokens a row, a chain or a ``tree``. ``absent``: rows may be. ``codes``:
        the result is quantised."""
        self._driver.where = f"{self._name}, attention of {rows} x {query_len} queries"
        *_, dim = self._kv[0].shape
        heads = cast(Attention, self.model.layers[0].mixer).heads
        table = torch.zeros(rows, 641, dtype=torch.int32, device=META)
        seen = torch.zeros(rows, query_len, dtype=torch.int32, device=META) if tree else None
        inputs = DecodeAttention(table, table[:, 0].contiguous(), query_len, 40960, skip_empty=absent, tree_BQ=seen)
        inputs = self.kernels.plan_decode(inputs, heads, self._kv[0])
        q = torch.empty(rows * query_len, heads, dim, dtype=self.model.dtype, device=META)
        into = Quantised.empty(len(q), heads * dim, dim, q.dtype, META) if codes else None
        self.kernels.decode_attention(q, self._kv[0], inputs, dim**-0.5, into=into)


def products(driver: CompilingDriver, table: ChoiceTable, rows: Iterable[str] | None = None) -> None:
    """Every product of ``table`` that is a Triton kernel, with and without a residual; ``rows``: those keys only."""
    kernels = nvidia_kernels(META, choices=table)
    for key in table.choices if rows is None else rows:
        driver.where = f"table, {key}"
        shape = LinearShape.from_key(key)
        choice = table.get(shape)
        if not isinstance(choice, Gemv | Skinny | Wide):
            continue
        x = torch.empty(shape.rows, shape.inner, dtype=shape.dtype, device=META)
        weight = torch.empty(shape.outputs, shape.inner, dtype=shape.format.dtype, device=META)
        grid = shape.format.grid(shape.outputs, shape.inner)
        scale = None if shape.block is None else torch.empty(grid, device=META)
        kernels.matmul.runner(shape)(x, Weight(weight, shape.format, None, scale), choice)


def _now(work: Callable[[], None]) -> None:
    work()


def _nothing(*_: object) -> None:
    pass
