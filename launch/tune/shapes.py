"""Which products and which decode attention a rank of a model asks for, at every bucket of both ladders.

Knows: how to ask the model itself, on torch's meta device, so that there is no second list of a family's products to
keep true. Does not know: GPUs, candidates, or what is measured first (plan.py).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from launch.tune.lone_rank import LoneRank
from models.cache_layout import CacheLayout, CacheView, PagedKV, SlotState
from models.config import ModelConfig
from models.group_size import require_legal_size
from models.inputs import DecodeAttention, StateRows, StepInputs
from models.kernels.attention.decode_variant import DecodeShape
from models.kernels.interface import Kernels, Rotation
from models.kernels.matmul.choice_table import LinearShape
from models.kernels.reference import ReferenceKernels
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer
from models.registry import model_class
from models.row_buckets import decode_ladder, every_bucket
from parallel.comm.all_reduce_dispatch import SIZE_LIMITS, SizeLimits
from parallel.layers.experts import ExpertSplit
from parallel.layers.weight import Weight

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

    def context(self, kernels: Kernels) -> ModelContext:
        """What its layers are built with."""
        split = ExpertSplit(whole=self.whole_experts)
        return ModelContext(LoneRank(self.ranks, kernels, self.limits), kernels, self.dtype, split)

    def skeleton(self, kernels: Kernels) -> Decoder:
        """The model without memory. Raises ValueError for an architecture that is not implemented."""
        with torch.device("meta"):
            return model_class(self.config.architecture)(self.config, self.context(kernels))


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
        self._recorder = ShapeRecorder()
        self._model = share.skeleton(self._recorder)
        self._caches = caches_of(self._model.cache_layout, 2, "meta")

    def asked(self, rows: int) -> tuple[tuple[LinearShape, ...], LinearShape]:
        """Products of the layers, the largest weight first, and of the head."""
        recorder, model = self._recorder, self._model
        recorder.seen.clear()
        with torch.no_grad():
            hidden_TN = model(step_inputs(model, rows, 1, PAGE, "meta"), self._caches)
            counted = recorder.seen.copy()
            model.logits(hidden_TN)
        (head,) = recorder.seen - counted
        often = {shape: times for shape, times in counted.items() if times > _ALONE} or counted
        return tuple(sorted(often, key=lambda shape: -shape.outputs * shape.inner)), head


def asked_attention(share: RankShare, rows: int) -> DecodeShape | None:
    """Decode attention of ``rows``; None for a model without attention."""
    mixers = [cast(DecoderLayer, layer).mixer for layer in share.skeleton(ShapeRecorder()).layers]
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

    ``distinct``: so many paged layers have memory of their own, which the others share with them by turns.
    """
    found: list[CacheView] = []
    paged: list[Tensor] = []
    for layer in layout.layers:
        if isinstance(layer, PagedKV):
            if distinct is None or len(paged) < distinct:
                paged.append(torch.randn(layer.shape(pages, PAGE), dtype=layer.dtype, device=device))
                found.append(paged[-1])
            else:
                found.append(paged[sum(isinstance(view, Tensor) for view in found) % distinct])
        elif isinstance(layer, SlotState):
            found.append(
                {
                    name: torch.zeros(slots, *shape, dtype=dtype, device=device)
                    for name, (shape, dtype) in layer.tensors.items()
                }
            )
        else:
            found.append(None)
    return found


def step_inputs(model: Decoder, rows: int, tokens: int, most: int, device: torch.device | str) -> StepInputs:
    """A decode step of ``rows`` rows that hold ``tokens`` tokens each, the new one included, in pages of their own."""
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


class ShapeRecorder(ReferenceKernels):
    """Notes the shape of every product it is asked for, and how often; computes nothing, on the meta device."""

    name = "recorder"

    def __init__(self) -> None:
        self.seen: Counter[LinearShape] = Counter()

    def linear(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return self._note(x_TN, weight, normed=False, gate_up=False)

    def add_norm_linear(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        return self._note(x_TN, weight, normed=True, gate_up=False), x_TN

    def gate_up(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return self._note(x_TN, weight, normed=False, gate_up=True)

    def add_norm_gate_up(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        return self._note(x_TN, weight, normed=True, gate_up=True), x_TN

    def rope_cache_attend(
        self,
        qkv_TX: Tensor,
        heads: int,
        kv_layer: Tensor,
        rotation: Rotation,
        inputs: DecodeAttention,
        scale: float,
    ) -> Tensor:
        return qkv_TX.new_empty(qkv_TX.shape[0], heads, kv_layer.shape[4])

    def route_top_k(
        self,
        logits_TE: Tensor,
        choices: int,
        renormalise: bool,
        local_E: Tensor,
        real_T: Tensor,
        load_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        weights_TC = logits_TE.new_empty(logits_TE.shape[0], choices, dtype=torch.float32)
        return weights_TC, weights_TC.to(torch.int32)

    def expert_mlp(
        self,
        x_TN: Tensor,
        gate_up: Weight,
        down: Weight,
        weights_TC: Tensor,
        local_TC: Tensor,
        *,
        all_experts: int,
    ) -> Tensor:
        return torch.empty_like(x_TN)

    def _note(self, x_TN: Tensor, weight: Weight, *, normed: bool, gate_up: bool) -> Tensor:
        self.seen[LinearShape.of(x_TN, weight, normed=normed, gate_up=gate_up)] += 1
        return x_TN.new_empty(x_TN.shape[0], weight.outputs // (2 if gate_up else 1))
