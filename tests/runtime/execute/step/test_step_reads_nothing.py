"""Nothing in a step reads the device or needs a tensor of the host: it runs on torch's meta device, which has no data.

What a GPU would answer with a hidden synchronisation, or with an error inside a capture, is an error here. Kernels are
the reference ones; those for GPUs are launched without looking at data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._pytree import tree_leaves

from models.layers.context import ModelContext
from models.registry import ARCHITECTURES, config_from_dict
from parallel.comm.collectives import SingleRank
from runtime.execute.cache.block_copy import BlockCopier
from runtime.execute.cache.pool import CachePool
from runtime.execute.device.protocol import Device
from runtime.execute.proposer import MakeProposer, Proposed, ProposerParts
from runtime.execute.result_ring import ResultRing
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.logit_edits import HISTORY
from runtime.execute.sampling.logprobs import StepPromptLogprobs, score_words
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.execute.staging import Chunks, apply_changes
from runtime.execute.step.memory import ExecutorConfig, StepParts
from runtime.execute.step.packed_pass import Lengths
from runtime.schedule.config import StepLimits
from runtime.speculate.synthetic import AnyTokens
from runtime.speculate.tree import branching
from tests.dispatch_mode import DispatchMode
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.plant import make_decode_step, make_mixed_step, make_prefill_step, reference_kernels
from tests.runtime.engine.rig import TINY

META = torch.device("meta")
SPARSE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
EVERYTHING = SamplingVariant(random=True, filters=True, penalties=True, min_tokens=True, logprobs=True, top_logprobs=5)
VARIANTS = [SamplingVariant(), SamplingVariant(random=True), EVERYTHING]
BLOCK = 16


class MetaDevice:
    """As much of a Device as tables, ring and pool ask for; work runs at once."""

    torch_device = META

    @property
    def compute(self) -> MetaDevice:
        return self

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def synchronize(self) -> None: ...

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=META)

    pinned = zeros


class OnTheDevice(DispatchMode):
    """Refuses every operation that takes or makes a tensor of the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        assert all(tensor.device == META for tensor in tensors), f"{func} needs the host"
        return result


@contextmanager
def step() -> Iterator[None]:
    with torch.no_grad(), OnTheDevice():
        yield


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=META)


class Parts:
    """Tables, ring and the work over a tiny model."""

    def __init__(self, shape: Mapping[str, object]) -> None:
        config, device = config_from_dict(dict(shape)), cast(Device, MetaDevice())
        context = ModelContext(SingleRank(), reference_kernels(), torch.bfloat16)
        with META:
            model = ARCHITECTURES[config.architecture](config, context)
        self.pool = CachePool(device, block_size=BLOCK, blocks=64, slots=16)
        caches = self.pool.allocate(model.cache_layout)
        self.tables = SlotTables(device, max_requests=16, max_blocks=8, vocab_size=config.vocab_size)
        self.ring = ResultRing(device, entries=5, rows=8, width=3, reported=42)
        limits = StepLimits(8, 16, BLOCK, 8 * BLOCK - 1)
        sizes = ExecutorConfig(limits, decode_buckets=(), memory_fraction=0.9, num_blocks=64, agree_min=int)
        parts = StepParts(device, model, caches, self.pool, self.tables, self.ring, cast(Any, None), sizes)
        self.decode, self.prefill = make_decode_step(parts), make_prefill_step(parts)
        self._parts = parts

    def with_windows(self, make: MakeProposer, tree: int) -> StepParts:
        parts = self._parts
        staging = SimpleNamespace(padded_chunks=lambda rows: Chunks(*[integers(rows)] * 7), max_rows=8)
        limits = replace(parts.limits, width=3, tree=tree)
        guessing = ProposerParts(parts.device, parts.model, self.pool, self.tables, limits)
        config = replace(parts.config, limits=limits)
        return replace(parts, staging=cast(Any, staging), config=config, proposer=make(guessing))


@pytest.fixture(autouse=True)
def toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)


@pytest.mark.parametrize("features", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [TINY, SPARSE, TINY | HYBRID], ids=["dense", "sparse", "hybrid"])
def test_a_decode_step(shape: Mapping[str, object], features: SamplingVariant) -> None:
    parts = Parts(shape)
    with step():
        parts.decode.decode(integers(8), features)
        parts.ring.undo()


@pytest.mark.parametrize("features", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [TINY, SPARSE, TINY | HYBRID], ids=["dense", "sparse", "hybrid"])
def test_a_prefill_step_that_scores_its_prompts(shape: Mapping[str, object], features: SamplingVariant) -> None:
    parts = Parts(shape)
    tokens, rows = integers(24), integers(2)
    chunks = Chunks(tokens, tokens, tokens, rows, rows, rows, rows, integers(2, 5))
    words = torch.zeros(score_words(5, 3), dtype=torch.int32, device=META)
    with step():
        scores = StepPromptLogprobs(cast(Any, None), 5, 3, words, words)
        parts.prefill.work.prefill(chunks, Lengths((12, 12), (12, 28)), features, scores)


@pytest.mark.parametrize("shape", [TINY, SPARSE, TINY | HYBRID], ids=["dense", "sparse", "hybrid"])
def test_a_mixed_step(shape: Mapping[str, object]) -> None:
    parts = Parts(shape)
    tokens, rows = integers(24), integers(4)
    chunks = Chunks(tokens, tokens, tokens, rows, rows, rows, rows)
    with step():
        parts.prefill.work.prefill(chunks, Lengths((0, 0, 10, 12), (0, 0, 10, 28), 2), SamplingVariant())


class DrawnTokens(AnyTokens):
    """As if they had been drawn."""

    def draw(self, rows_B: torch.Tensor, columns: SlotColumns, count: int, variant: SamplingVariant) -> Proposed:
        return self.propose(rows_B, columns, count)._replace(drafted=self.room(len(rows_B), count))

    def room(self, rows: int, count: int) -> Drafted:
        return Drafted(torch.zeros(rows, count, self._vocab_size, device=META), integers(rows, count), None)


@pytest.mark.parametrize("features", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("shape", "make", "tree"),
    [(TINY, AnyTokens, 0), (SPARSE, AnyTokens, 0), (TINY, branching(AnyTokens, 3), 5), (TINY, DrawnTokens, 0)],
    ids=["dense", "sparse", "trees", "drawn"],
)
def test_windows_beside_chunks(
    shape: Mapping[str, object], make: MakeProposer, tree: int, features: SamplingVariant
) -> None:
    parts = Parts(shape)
    role = make_mixed_step(parts.with_windows(make, tree))
    tokens, rows = integers(20 + 2 * role.decode.tokens), integers(4)
    chunks = Chunks(tokens, tokens, tokens, rows, rows, rows, rows)
    with step():
        role.decode.propose(2, features)
        role.work.prefill(chunks, Lengths((0, 0, 8, 12), (0, 0, 8, 28), 2 * role.decode.tokens), features)


def test_what_a_plan_changes() -> None:
    tables = Parts(TINY).tables
    changes = {
        "slots_N": integers(3),
        "records_NX": torch.zeros(3, tables.record_words, dtype=torch.int32, device=META),
        "cells_M": integers(4),
        "blocks_M": torch.zeros(4, dtype=torch.int32, device=META),
        "row_map_B": integers(8),
        "chunk_tokens_3T": integers(3, 10),
        "chunk_rows_4R": integers(4, 2),
        "scored_2S": integers(2, 4),
        "copied_blocks_2C": integers(2, 3),
        "restored_2H": integers(2, 2),
        "kept_2C": integers(2, 3),
        "reset_K": integers(2),
        "seen_slots_T": integers(6),
        "seen_T": integers(6),
        "in_prompt_T": torch.zeros(6, dtype=torch.bool, device=META),
        "edit_slots_E": integers(2),
        "edit_sizes_E3": integers(2, 3).int(),
        "recent_EH": integers(2, HISTORY).int(),
    }
    pool = Parts(TINY | HYBRID).pool
    copier = BlockCopier(pool.paged)
    pool.warm_up_copies()
    with step():
        apply_changes(
            changes, tables, integers(8), integers(3, 64), integers(4, 8), integers(2, 64), *[integers(2, 8)] * 2
        )
        pool.reset(integers(3))
        copier.copy(integers(2, 3))
        pool.copy_states(integers(2, 2))


@pytest.mark.parametrize(
    "breach",
    [
        lambda lengths: lengths.max().item(),
        lambda lengths: lengths[lengths > 0],
        lambda lengths: bool((lengths > 0).any()),
        lambda lengths: lengths + torch.ones(8, dtype=torch.int32),
        lambda lengths: torch.arange(8).to(lengths.device),
        lambda lengths: lengths.tolist(),
    ],
    ids=["item", "mask", "bool", "mixed", "copied", "tolist"],
)
def test_a_breach_is_found(breach: Callable[[torch.Tensor], object]) -> None:
    lengths = Parts(TINY).tables.gather(integers(8)).length
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)), step():
        breach(lengths)
