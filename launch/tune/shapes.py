"""Which products and which decode attention a rank of a model asks for, at every bucket of both ladders.

Knows: how to ask the model itself, on torch's meta device, so that there is no second list of a family's products to
keep true. Does not know: GPUs, candidates, or what is measured first (plan.py).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from models.cache_layout import CacheLayout, CacheView
from models.config import ModelConfig
from models.group_size import require_legal_size
from models.inputs import DecodeAttention, StateRows, StepInputs
from models.kernels.attention.decode_variant import DecodeShape
from models.kernels.matmul.choice_table import LinearShape
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer
from models.ops import rows_reference
from models.ops.contract import Ops
from models.ops.table import Row, TableOps, plain
from models.registry import model_class
from models.row_buckets import decode_ladder, every_bucket
from models.weights import without_memory
from parallel.comm.collectives import Collectives, PendingAllReduce
from parallel.comm.quantised import Quantised
from parallel.comm.symmetric_all_reduce import SIZE_LIMITS, SizeLimits, shots_for
from parallel.layers.experts import ExpertSplit
from parallel.layers.weight import Weight, WeightPlan


class LoneRank(Collectives):
    """The first of ``size`` ranks. ``limits``: up to which sizes the real ones have a kernel for sums."""

    rank = 0

    def __init__(self, size: int, kernels: Ops, limits: SizeLimits | None) -> None:
        self.size = size
        self._kernels, self._limits = kernels, limits

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | PendingAllReduce:
        rows, width = x_TN.shape
        if self.size == 1 or self._limits is None or shots_for(self._limits, rows, width, x_TN.dtype) is None:
            return x_TN
        return PendingAllReduce(x_TN, self)

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
        """A norm without a sum, which is most of what that kernel computes."""
        if residual_TN is None:
            return self._kernels.rms_norm(x_TN, norm_N, eps, into), x_TN
        return self._kernels.add_rms_norm(x_TN, residual_TN, norm_N, eps, into)

    def all_gather(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.size, dim=-1)


PAGE = 64
_ALONE = (
    1  # a product that one layer of many asks for is not worth a measurement: the first, which has no sum before it
)


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's share of a model. ``limits``: of the sums between ranks; None where there is one rank, or NCCL does
    them all. ``whole_experts``: experts lie on ranks whole.
    """

    config: ModelConfig
    ranks: int = 1
    dtype: torch.dtype = torch.bfloat16
    whole_experts: bool = False
    limits: SizeLimits | None = None

    @classmethod
    def of(
        cls, config: ModelConfig, ranks: int, dtype: torch.dtype | None = None, *, whole_experts: bool = False
    ) -> RankShare:
        """With the usual limits. Raises ValueError, naming what is legal, where the model cannot be split so."""
        require_legal_size(config, ranks, whole_experts=whole_experts)
        return cls(config, ranks, dtype or config.dtype, whole_experts, SIZE_LIMITS.get(ranks))

    def cut(self, layers: int) -> RankShare:
        """The same with its first ``layers`` layers only."""
        config = self.config
        layers = min(layers, config.layers)
        experts = config.experts
        if experts is not None:
            experts = dataclasses.replace(experts, layers=type(experts.layers)(n for n in experts.layers if n < layers))
        config = dataclasses.replace(config, layers=layers, experts=experts, blocks=config.blocks[:layers])
        return dataclasses.replace(self, config=config)

    def context(self, kernels: Ops, plan: WeightPlan | None = None) -> ModelContext:
        """What its layers are built with."""
        split = ExpertSplit(whole=self.whole_experts)
        collectives = LoneRank(self.ranks, kernels, self.limits)
        return ModelContext(collectives, kernels, self.dtype, split, plan=plan or WeightPlan())

    def skeleton(self, kernels: Ops) -> Decoder:
        """The model without memory. Raises ValueError for an architecture that is not implemented."""
        build, config = model_class(self.config.architecture), self.config
        return without_memory(lambda plan: build(config, self.context(kernels, plan)), config.quantization)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step of ``rows`` asks for. ``layers``: products of the decoder layers, the largest weight first;
    ``head``: of decode steps and tails, whose rows are those that draw; None for buckets that no decode step has.
    """

    rows: int
    layers: tuple[LinearShape, ...]
    head: LinearShape | None


def asked_products(share: RankShare, buckets: Iterable[int], most_rows: int) -> list[Asked]:
    """Of every bucket; ``most_rows``: of the largest decode step."""
    decodes, small = set(decode_ladder(most_rows)), _Skeleton(share.cut(layers_enough(share)))
    found = []
    for rows in buckets:
        layers, head = small.asked(rows)
        found.append(Asked(rows, layers, head if rows in decodes else None))
    return found


def layers_enough(share: RankShare, least: int = 4) -> int:
    """How many of the first layers ask for every product that the whole model asks for; at least ``least``."""
    whole, layers = set(_Skeleton(share).asked(1)[0]), min(least, share.config.layers)
    while layers < share.config.layers and set(_Skeleton(share.cut(layers)).asked(1)[0]) != whole:
        layers = min(2 * layers, share.config.layers)
    return layers


class _Skeleton:
    def __init__(self, share: RankShare) -> None:
        self._seen: Counter[LinearShape] = Counter()
        self._model = share.skeleton(recording_ops(self._seen))
        self._caches = caches_of(self._model.cache_layout, 2, "meta")

    def asked(self, rows: int) -> tuple[tuple[LinearShape, ...], LinearShape]:
        """Products of the layers, the largest weight first, and of the head."""
        seen, model = self._seen, self._model
        seen.clear()
        with torch.no_grad():
            hidden_TN = model(step_inputs(model, rows, 1, PAGE, "meta"), self._caches)
            counted = seen.copy()
            model.logits(hidden_TN)
        (head,) = seen - counted
        often = {shape: times for shape, times in counted.items() if times > _ALONE} or counted
        return tuple(sorted(often, key=lambda shape: -shape.outputs * shape.inner)), head


def asked_attention(share: RankShare, rows: int) -> DecodeShape | None:
    """Decode attention of ``rows``; None for a model without attention."""
    mixers = [cast(DecoderLayer, layer).mixer for layer in share.skeleton(recording_ops(Counter())).layers]
    for mixer in mixers:
        if isinstance(mixer, Attention):
            queries = mixer.heads // mixer.kv_heads
            return DecodeShape(rows * mixer.kv_heads, queries, mixer.head_dim, share.dtype)
    return None


def buckets_of(most_rows: int, most_tokens: int) -> tuple[int, ...]:
    """Every row count of a captured step's products."""
    return every_bucket(most_rows, most_tokens)


def caches_of(
    layout: CacheLayout, pages: int, device: torch.device | str, *, slots: int = 2, distinct: int | None = None
) -> list[CacheView]:
    """Memory for what every layer keeps of a sequence; random where it is paged, zero where it is state.

    ``distinct``: so many paged layers have separate memory, which the others share with them by turns.
    """
    found: list[CacheView] = [None] * len(layout.layers)
    for group in layout.groups(PAGE):
        paged: list[Tensor] = []
        for index, number in enumerate(group.layers):
            if distinct is None or index < distinct:
                paged.append(torch.randn(group.shape(pages), dtype=group.dtype, device=device))
            found[number] = paged[index % len(paged)]
    for state, numbers in layout.states:
        for number in numbers:
            found[number] = {
                name: torch.zeros(slots, *shape, dtype=dtype, device=device)
                for name, (shape, dtype) in state.tensors.items()
            }
    return found


def step_inputs(model: Decoder, rows: int, tokens: int, most: int, device: torch.device | str) -> StepInputs:
    """A decode step of ``rows`` rows that hold ``tokens`` tokens each, the new one included, in separate pages."""
    pages = -(-tokens // PAGE)
    table = torch.zeros(rows, -(-most // PAGE), dtype=torch.int32, device=device)
    table[:, :pages] = torch.arange(1, rows * pages + 1, dtype=torch.int32, device=device).view(rows, pages)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    positions = (lengths - 1).long()
    slots = table[:, pages - 1].long() * PAGE + positions % PAGE
    ids = torch.randint(model.config.vocab_size, (rows,), device=device)
    attention = DecodeAttention(table, lengths, 1, most)
    state = StateRows(torch.arange(1, rows + 1, device=device)) if model.cache_layout.has_slot_state else None
    return StepInputs(ids, positions, slots, attention, state=state)


def recording_ops(seen: Counter[LinearShape]) -> TableOps:
    """Ops that count every product they are asked for in ``seen``, and compute nothing; for the meta device."""

    def note(x_TN: Tensor, weight: Weight, *_: None, normed: bool = False, gate_up: bool = False) -> Tensor:
        for part in weight.parts or (weight,):  # several follow a norm, and SiLU-mul follows them, in other launches
            alone = part is weight
            seen[LinearShape.of(x_TN, part, normed=normed and alone, gate_up=gate_up and alone)] += 1
        return x_TN.new_empty(x_TN.shape[0], weight.outputs // (2 if gate_up else 1))

    def rows() -> Iterator[Row]:
        yield plain("linear", note)
        yield plain("gate_up", partial(note, gate_up=True))
        for op, gate_up in (("add_norm_linear", False), ("add_norm_gate_up", True)):
            noted = partial(note, normed=True, gate_up=gate_up)
            yield plain(op, lambda x, residual, norm, eps, weight, *_, noted=noted: (noted(x, weight), x))
        yield plain(
            "rope_cache_attend", lambda qkv, heads, kv_layer, *_: qkv.new_empty(len(qkv), heads, kv_layer.shape[4])
        )
        yield plain("route_top_k", lambda logits, choices, *_: tuple(logits.new_empty(2, len(logits), choices).int()))
        yield plain("expert_mlp", lambda x, *_, all_experts, limit=None: torch.empty_like(x))

    ops = TableOps()
    ops.bind_rows((*rows(), *rows_reference.ROWS))
    return ops
