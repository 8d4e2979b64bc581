"""The pre-norm decoder: how a stack of layers runs, and which checkpoint tensors fill it. Families say what is in it.

Knows: the order of embedding, layers, final norm and head, the residual stream, and how parts find their tensors.
Does not know: which layers there are (models/families), how one mixes, files, sampling, schedules, or which kernels and
collectives it was given.
Shape letters as in models/inputs.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn

from models.cache_layout import CacheLayout, CacheView, LayerCache, SlotState, StateBanks
from models.config import FamilyConfig, ModelConfig
from models.group_size import require_legal_size
from models.inputs import DecodeAttention, MixedAttention, RepeatedPrefill, StateRows, StepInputs
from models.layers.attention import Attention
from models.layers.checkpoint_parts import CheckpointParts
from models.layers.context import ModelContext
from models.layers.layer_tap import LayerTap
from models.layers.mixer import Mixer, Part
from models.layers.mlp import GatedMLP, Relu2MLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from parallel.comm.collectives import GroupCollectives, PendingAllReduce
from parallel.layers.embedding import LMHead, VocabParallelEmbedding, gather_logits
from parallel.layers.shard import Shard, ShardedModule, VocabShard, whole

MTPLayout = Literal["mtp", "nextn", "blocks"]  # as Qwen3-Next's, DeepSeek-V3's and Nemotron-H's checkpoints have it


class DecoderLayer(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x)), with each addition left to the norm that follows it.

    Either half may be None: there are families whose blocks have one of the two. Raises ValueError without both.
    ``mixer_post``, ``mlp_post``: norms of what a half adds (sandwich norms). ``scalar`` multiplies the layer's result,
    residual stream included; together with ``mlp_post``.
    """

    def __init__(
        self, mixer: Mixer[Any] | None, mlp: GatedMLP | Relu2MLP | SparseMLP | None, *,
        mixer_post: RMSNorm | None = None, mlp_post: RMSNorm | None = None, scalar: LayerScalar | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scalar = scalar
        self.mixer_post, self.mlp_post = mixer_post, mlp_post
        if mixer is None and mlp is None:
            raise ValueError("a layer without mixer and MLP does nothing")
        self.mixer = mixer
        self.mlp = mlp

    @property
    def cache(self) -> LayerCache:
        return None if self.mixer is None else self.mixer.cache

    def forward(
        self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None, inputs: StepInputs, cache: CacheView,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor | PendingAllReduce, Tensor]:  # fmt: skip
        """``wanted_R``: the tokens whose results are read; None means all. Only a mixer can leave tokens out."""
        for part in self.parts(inputs, cache, wanted_R):
            x_TN, residual_TN = part(x_TN, residual_TN)
        return x_TN, cast(Tensor, residual_TN)

    def parts(self, inputs: StepInputs, cache: CacheView, wanted_R: Tensor | None = None) -> Iterator[Part]:
        """As Mixer.parts."""
        if (mixer := self.mixer) is not None:
            yield from mixer.parts(inputs, cache, wanted_R)
            if (post := self.mixer_post) is not None:
                yield lambda x_TN, residual_TN: (post.add(x_TN, None)[0], residual_TN)
        if isinstance(mlp := self.mlp, SparseMLP):
            real_T = cast(Tensor, inputs.real_T)  # Decoder.forward has filled it in
            real_T = real_T if wanted_R is None else real_T.index_select(0, wanted_R)
            yield lambda x_TN, residual_TN: mlp(x_TN, residual_TN, real_T, inputs.exchange_rows)
        elif mlp is not None:
            yield mlp
        if (after := self.mlp_post) is not None:
            yield lambda x_TN, residual_TN: (after.add(x_TN, None)[0], residual_TN)
        if self.scalar is not None:
            yield self.scalar


class LayerScalar(ShardedModule):
    """One number [1], times the residual stream (Gemma 4)."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.scalar_1 = context.parameter(1)

    def forward(self, x_TN: Tensor | PendingAllReduce, residual_TN: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of a norm's result and the stream that it is still to be added to."""
        return cast(Tensor, x_TN) * self.scalar_1, cast(Tensor, residual_TN) * self.scalar_1

    def shards(self) -> dict[str, Shard]:
        return {"layer_scalar": whole(self.scalar_1, centre=1.0)}


class Decoder(CheckpointParts):
    """Token ids to final hidden states to this rank's logits. Built on torch's default device, uninitialised.

    A subclass makes the four parts below, its ``layers`` of DecoderLayer, and says its ``checkpoint_names``: module
    part -> checkpoint tensor without what follows the last dot (``weight``, ``bias``), ``{}`` standing for the numbers
    of layer and expert in both; several names where checkpoints differ. Tensors whose names begin like one of
    ``unused_tensors`` belong to parts of a checkpoint that are not run with the model. ``mtp_layout``: how checkpoints
    name an MTP layer, which drafts for the model where it is asked to (models/drafters/load.py); None where
    none is known. ``family_config``: how its config.json is read.
    """

    checkpoint_names: ClassVar[Mapping[str, str | tuple[str, ...]]]
    unused_tensors: ClassVar[tuple[str, ...]] = ()
    mtp_layout: ClassVar[MTPLayout | None] = None
    family_config: ClassVar[FamilyConfig] = FamilyConfig()
    cos_sin_LR: Tensor  # of rotary positions, shared by the layers of attention
    embedding: VocabParallelEmbedding
    layers: nn.ModuleList
    final_norm: RMSNorm
    lm_head: LMHead

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        exchange = context.experts.exchange
        groups = exchange.groups if exchange is not None else 1
        require_legal_size(config, context.size, whole_experts=context.experts.whole, groups=groups)
        self.config = config
        self.dtype, self.kv_dtype = context.dtype, context.kv_dtype
        self.collectives = context.collectives
        self.kernels = context.kernels
        self.expert_split = context.experts
        self._shared = exchange is not None
        self._few_layers = False

    def leaves_unread(self, tensor: str) -> bool:
        """Whether a tensor of a checkpoint belongs to a part that is not run with the model."""
        behind = range(self.config.layers, self.config.layers + self.config.mtp_layers)
        numbered = self.mtp_layout == "nextn" and tensor.startswith(tuple(f"model.layers.{n}." for n in behind))
        return numbered or tensor.startswith(self.unused_tensors)

    @cached_property
    def cache_layout(self) -> CacheLayout:
        """What this rank keeps of a sequence, layer by layer."""
        return CacheLayout(tuple(cast(DecoderLayer, layer).cache for layer in self.layers))

    @cached_property
    def irrevocable(self) -> tuple[str, ...]:
        """Names of its mixers whose state cannot leave out tokens that were applied, as windows need it."""
        return tuple(sorted({type(mixer).__name__ for mixer in self.slot_mixers.values() if not mixer.replays}))

    @cached_property
    def slot_mixers(self) -> dict[int, Mixer[StateBanks]]:
        """The mixers that keep SlotState, by the number of their layer."""
        mixers = {number: cast(DecoderLayer, layer).mixer for number, layer in enumerate(self.layers)}
        return {n: mixer for n, mixer in mixers.items() if mixer is not None and isinstance(mixer.cache, SlotState)}

    @property
    def vocab_shard(self) -> VocabShard:
        """The token ids [start, end) that this rank's logits columns stand for."""
        return self.lm_head.vocab

    def forward(self, inputs: StepInputs, caches: Sequence[CacheView], tap: LayerTap | None = None) -> Tensor:
        """Final-normed hidden states of every token of the step [T, N], or of ``inputs.logit_rows_R`` [R, N].

        ``caches``: a view a layer, of what ``cache_layout`` declares; all tokens are written into them. Of the last
        layer only the wanted tokens are read, a few of a prefill: the rest of it is not computed. ``tap`` holds the
        residual streams of all T tokens after its layers afterwards; with one, the last layer is computed whole.
        """
        inputs = self._with_real_tokens(inputs, caches)
        plans = {shape: self._with_prefill_plan(inputs, *found, caches) for shape, found in self._shapes.items()}
        planned = {
            alike: self._planned(plans[mixer.shape].of_group(self.cache_layout.group_of(number)), number, mixer, caches)
            for alike, (number, mixer) in self._attentions.items()
        }
        x_TN: Tensor | PendingAllReduce = self.embedding(inputs.token_ids_T)
        residual_TN: Tensor | None = None  # nothing to add before the first layer
        wanted_R = inputs.logit_rows_R
        early_R = None if tap is not None or self._whole_last_layer() else wanted_R
        if tap is not None:
            tap.begin()
        if len(caches) != len(self.layers):
            raise ValueError(f"{len(caches)} cache views for {len(self.layers)} layers")
        for number in self._one_layer_a_kind if self._few_layers else range(len(self.layers)):
            last_R = early_R if number + 1 == len(self.layers) else None
            # A layer's first norm adds up the stream that the layer before it left.
            before = None if tap is None else partial(tap.take, number - 1)
            step = planned.get(self._alike[number], inputs)
            for part in cast(DecoderLayer, self.layers[number]).parts(step, caches[number], last_R):
                x_TN, residual_TN = part(x_TN, residual_TN)
                if before is not None:
                    before(residual_TN)
                    before = None
        hidden_TN, stream_TN = self.final_norm.add(x_TN, residual_TN)
        if tap is not None:
            tap.take(len(self.layers) - 1, stream_TN)
            if self._few_layers:
                tap.fill_up(stream_TN)
        return hidden_TN if wanted_R is None or early_R is not None else hidden_TN.index_select(0, wanted_R)

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Inside, ``forward`` runs one layer of each kind only: every kernel is loaded, and the result means nothing.

        What is about to be captured is run like that before, which takes a tenth of the time of all layers.
        """
        before, self._few_layers = self._few_layers, True
        try:
            yield
        finally:
            self._few_layers = before

    @cached_property
    def _one_layer_a_kind(self) -> tuple[int, ...]:
        """The first layer (nothing to add before it), the last (fewer tokens), and one of each kind between them."""
        last = len(self.layers) - 1
        kinds: dict[object, int] = {}
        for number in range(1, last):
            kinds.setdefault(_kind(self.layers[number]), number)
        return tuple(sorted({0, *kinds.values(), last}))

    def repeat_prefill(
        self, page_table_BP: Tensor, max_tokens: int, caches: Sequence[CacheView]
    ) -> RepeatedPrefill | None:
        """Prefill attention for captured steps (Ops.repeat_prefill); None where they cannot be, or none attends, or
        layers do so in several shapes, which have a plan each."""
        if len(self._shapes) != 1:
            return None
        ((number, attention),) = self._shapes.values()
        kv_layer = cast(Tensor, caches[number])
        return self.kernels.repeat_prefill(page_table_BP, max_tokens, attention.heads, kv_layer)

    def splits_chunks(self, caches: Sequence[CacheView]) -> bool:
        """Whether captured steps can split the keys of short chunks (Ops.splits_chunks)."""
        if len(self._shapes) != 1:
            return False
        ((number, attention),) = self._shapes.values()
        return self.kernels.splits_chunks(attention.heads, cast(Tensor, caches[number]))

    @cached_property
    def _alike(self) -> tuple[object, ...]:
        """Of each layer that attends: equal for those that one plan of a decode step serves; None for others."""
        mixers = [cast(DecoderLayer, layer).mixer for layer in self.layers]
        return tuple((m.heads, m.cache, m.kind.key) if isinstance(m, Attention) else None for m in mixers)

    @cached_property
    def _attentions(self) -> dict[object, tuple[int, Attention]]:
        """The first layer of each kind of attention, with its number."""
        found: dict[object, tuple[int, Attention]] = {}
        for number, alike in enumerate(self._alike):
            if alike is not None and alike not in found:
                found[alike] = number, cast(Attention, cast(DecoderLayer, self.layers[number]).mixer)
        return found

    @cached_property
    def _shapes(self) -> dict[tuple[int, int, int], tuple[int, Attention]]:
        """The first layer of each shape of attention, with its number: one plan of prefill serves those of a shape."""
        found = reversed(self._attentions.values())
        return {mixer.shape: (number, mixer) for number, mixer in found}

    @property
    def last_layer_asks_alone(self) -> bool:
        """Whether ``forward`` reads ``inputs.last_attention``: the last layer attends, and not for all tokens."""
        return isinstance(cast(DecoderLayer, self.layers[-1]).mixer, Attention) and not self._whole_last_layer()

    def _whole_last_layer(self) -> bool:
        """Groups bring as many rows to its exchange as to the others', and expert load is counted of every token. A
        layer without mixer takes all tokens that it is given.

        Over gloo the sums of a step keep one size: where a rank makes a call too many, gloo would end the process of
        another one that gets more bytes than its own call is for, and no error would name the cause.
        """
        mlp = self.layers[-1].mlp
        counted = isinstance(mlp, SparseMLP) and mlp.load_E is not None
        over_gloo = isinstance(self.collectives, GroupCollectives) and self.final_norm.weight.device.type == "cpu"
        return self._shared or counted or over_gloo or self.layers[-1].mixer is None

    def logits(self, hidden_RN: Tensor) -> Tensor:
        """This rank's logits [R, V_local] of final-normed hidden states; padding columns are -inf."""
        logits_RV: Tensor = self.lm_head(hidden_RN)
        return logits_RV

    def gather_logits(self, local_RV: Tensor) -> Tensor:
        """All ranks' logits [R, V] on every rank, from each rank's ``logits``. One all-gather."""
        return gather_logits(local_RV, self.config.vocab_size, self.collectives)

    def _with_prefill_plan(
        self, inputs: StepInputs, number: int, mixer: Attention, caches: Sequence[CacheView]
    ) -> StepInputs:
        """With what layers of attention of one shape share of a step's prefill, unless it is there already."""
        attention = inputs.attention
        prefill = attention.prefill if isinstance(attention, MixedAttention) else attention
        if isinstance(prefill, DecodeAttention) or prefill.planned is not None:
            return inputs
        prefill = self.kernels.plan_prefill(prefill, mixer.heads, cast(Tensor, caches[number]))
        if isinstance(attention, MixedAttention):
            return replace(inputs, attention=MixedAttention(attention.decode, prefill))
        return replace(inputs, attention=prefill)

    def _planned(self, inputs: StepInputs, number: int, mixer: Attention, caches: Sequence[CacheView]) -> StepInputs:
        """With what layers of attention like layer ``number`` share of a step's decode."""
        attention, kv_layer = inputs.attention, cast(Tensor, caches[number])
        if inputs.last_attention is not None:
            inputs = replace(inputs, last_attention=self._planned_decode(inputs.last_attention, mixer, kv_layer))
        if isinstance(attention, MixedAttention):
            prefill = attention.prefill
            if isinstance(prefill, DecodeAttention):
                prefill = self._planned_decode(prefill, mixer, kv_layer)
            decode = self._planned_decode(attention.decode, mixer, kv_layer)
            return replace(inputs, attention=MixedAttention(decode, prefill))
        if isinstance(attention, DecodeAttention):
            return replace(inputs, attention=self._planned_decode(attention, mixer, kv_layer))
        return inputs

    def _planned_decode(self, attention: DecodeAttention, mixer: Attention, kv_layer: Tensor) -> DecodeAttention:
        if attention.work is not None:
            return attention
        return self.kernels.plan_decode(attention, mixer.heads, kv_layer, mixer.kind)

    def _with_real_tokens(self, inputs: StepInputs, caches: Sequence[CacheView]) -> StepInputs:
        """Masked tokens write into page 0, and only they do; experts leave them out."""
        if self.config.experts is None or inputs.real_T is not None:
            return inputs
        paged = self.cache_layout.first_paged
        if paged is None:
            return replace(inputs, real_T=cast(StateRows, inputs.state).real(len(inputs.token_ids_T)))
        page_size = cast(Tensor, caches[paged]).shape[2]
        return replace(inputs, real_T=inputs.of_group(0).kv_slots_T >= page_size)

    def checkpoint_copies(self) -> dict[str, Shard]:
        """Checkpoint tensors that may be there but only repeat another one: the head of a tied model."""
        if not self.config.tied_embeddings:
            return {}
        return {self.checkpoint_names_of("lm_head.weight")[0]: self.embedding.shards()["weight"]}


def _kind(layer: nn.Module) -> object:
    """Equal for layers that launch the same kernels: modules, numbers and words in them, shapes of parameters."""
    plain = (int, float, bool, str, type(None))
    return tuple(
        (
            path,
            type(module),
            tuple(sorted((name, repr(value)) for name, value in vars(module).items() if isinstance(value, plain))),
            tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters(recurse=False)),
        )
        for path, module in layer.named_modules()
    )
