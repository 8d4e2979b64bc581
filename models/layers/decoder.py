"""The pre-norm decoder of every architecture, dense or sparse; each is this with a few switches and a name table.

Knows: the order of layers, the residual stream, and which checkpoint tensors fill the parameters.
Does not know: files, sampling, schedules, or which kernels and collectives it was given.
Shape letters as in models/inputs.py.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.group_size import require_legal_size
from models.inputs import PrefillAttention, RepeatedPrefill, StepInputs
from models.kernels.interface import Kernels
from models.layers.attention import Attention
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.comm.collectives import Collectives, GroupCollectives, PendingAllReduce
from parallel.layers.embedding import LMHead, VocabParallelEmbedding, gather_logits
from parallel.layers.experts import ExpertSplit
from parallel.layers.shard import HeadShard, ScatteredShard, Shard, ShardContext, ShardedModule, VocabShard


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What one rank stores of a token: ``layers`` times keys and values of [kv_heads, head_dim] in ``dtype``."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Switches:
    """Where the architectures differ, experts aside (ModelConfig.experts)."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False


class DecoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)), with each addition left to the norm that follows it."""

    mlp: GatedMLP | SparseMLP

    def __init__(
        self,
        config: ModelConfig,
        switches: Switches,
        placement: ShardContext,
        kernels: Kernels,
        *,
        number: int,
        split: ExpertSplit,
    ) -> None:
        super().__init__()
        self.attention = Attention(
            config,
            placement,
            kernels,
            qkv_bias=switches.qkv_bias,
            output_bias=switches.output_bias,
            head_norm=switches.head_norm,
        )
        experts = config.experts
        if experts is not None and number in experts.layers:
            self.mlp = SparseMLP(config, experts, placement, kernels, layer=number, split=split)
        else:
            self.mlp = GatedMLP(config, placement, kernels, bias=switches.mlp_bias)

    def forward(
        self,
        x_TN: Tensor | PendingAllReduce,
        residual_TN: Tensor | None,
        inputs: StepInputs,
        kv_layer: Tensor,
        cos_sin_LR: Tensor,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor | PendingAllReduce, Tensor]:
        """``wanted_R``: the tokens whose results somebody reads; None means all."""
        x_TN, residual_TN = self.attention(x_TN, residual_TN, inputs, kv_layer, cos_sin_LR, wanted_R)
        if isinstance(self.mlp, SparseMLP):
            real_T = cast(Tensor, inputs.real_T)  # Decoder.forward has filled it in
            real_T = real_T if wanted_R is None else real_T.index_select(0, wanted_R)
            x_TN, residual_TN = self.mlp(x_TN, residual_TN, real_T, inputs.exchange_rows)
        else:
            x_TN, residual_TN = self.mlp(x_TN, residual_TN)
        return x_TN, residual_TN


class Decoder(nn.Module):
    """Token ids to final hidden states to this rank's logits. Built on torch's default device, uninitialised.

    A subclass says its ``switches`` and its ``checkpoint_names``: module part -> checkpoint tensor without what follows
    the last dot (``weight``, ``bias``), ``{}`` standing for the numbers of layer and expert in both; several names
    where checkpoints differ. ``experts`` says how experts lie on the group; by default every rank has a share of each.
    """

    checkpoint_names: ClassVar[Mapping[str, str | tuple[str, ...]]]

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        collectives: Collectives,
        kernels: Kernels,
        experts: ExpertSplit | None = None,
    ) -> None:
        super().__init__()
        split = experts or ExpertSplit()
        groups = split.exchange.groups if split.exchange is not None else 1
        require_legal_size(config, collectives.size, whole_experts=split.whole, groups=groups)
        placement = ShardContext(collectives, kernels, dtype)
        switches = self.switches(config)
        self.config = config
        self.dtype = dtype
        self.collectives = collectives
        self.kernels = kernels
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, placement)
        self.layers = nn.ModuleList(
            DecoderLayer(config, switches, placement, kernels, number=number, split=split)
            for number in range(config.layers)
        )
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement, kernels)
        tied_to = self.embedding if config.tied_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, placement, tied_to)
        self.cos_sin_LR = cos_sin_cache(config.rope, config.rotary_dim, config.max_length)
        self._shared = split.exchange is not None
        self._heads = HeadShard(config.heads, config.kv_heads, collectives.rank, collectives.size)

    @staticmethod
    def switches(config: ModelConfig) -> Switches:
        raise NotImplementedError

    @property
    def kv_geometry(self) -> KVGeometry:
        """The KV cache of this rank; allocate each layer with ``models.inputs.empty_kv_layer``."""
        return KVGeometry(self.config.layers, self._heads.local_kv_heads, self.config.head_dim, self.dtype)

    @property
    def vocab_shard(self) -> VocabShard:
        """The token ids [start, end) that this rank's logits columns stand for."""
        return self.lm_head.vocab

    def forward(self, inputs: StepInputs, kv_layers: Sequence[Tensor]) -> Tensor:
        """Final-normed hidden states of every token of the step [T, N], or of ``inputs.logit_rows_R`` [R, N]; writes
        the KV of all into ``kv_layers``.

        Of the last layer nobody reads but the wanted tokens, a few of a prefill: the rest of it is not computed.
        """
        inputs = self._with_real_tokens(self._planned(inputs, kv_layers[0]), kv_layers[0])
        x_TN: Tensor | PendingAllReduce = self.embedding(inputs.token_ids_T)
        residual_TN: Tensor | None = None  # nothing to add before the first layer
        wanted_R = inputs.logit_rows_R
        early_R = None if self._whole_last_layer() else wanted_R
        for number, (layer, kv_layer) in enumerate(zip(self.layers, kv_layers, strict=True)):
            last_R = early_R if number + 1 == len(self.layers) else None
            x_TN, residual_TN = layer(x_TN, residual_TN, inputs, kv_layer, self.cos_sin_LR, last_R)
        hidden_TN = self.final_norm.add(x_TN, residual_TN)[0]
        return hidden_TN if wanted_R is None or early_R is not None else hidden_TN.index_select(0, wanted_R)

    def repeat_prefill(self, page_table_BP: Tensor, max_tokens: int, kv_layer: Tensor) -> RepeatedPrefill | None:
        """Prefill attention for captured steps (Kernels.repeat_prefill); None where they cannot be."""
        heads = self._heads
        return self.kernels.repeat_prefill(page_table_BP, max_tokens, heads.local_heads, heads.local_kv_heads, kv_layer)

    def _whole_last_layer(self) -> bool:
        """Groups bring as many rows to its exchange as to the others', and expert load is counted of every token.

        Over gloo the sums of a step keep one size: where a rank makes a call too many, gloo would end the process of
        another one that gets more bytes than its own call is for, and nobody could tell whose fault that was.
        """
        mlp = self.layers[-1].mlp
        counted = isinstance(mlp, SparseMLP) and mlp.load_E is not None
        over_gloo = isinstance(self.collectives, GroupCollectives) and self.final_norm.weight.device.type == "cpu"
        return self._shared or counted or over_gloo

    def logits(self, hidden_RN: Tensor) -> Tensor:
        """This rank's logits [R, V_local] of final-normed hidden states; padding columns are -inf."""
        logits_RV: Tensor = self.lm_head(hidden_RN)
        return logits_RV

    def gather_logits(self, local_RV: Tensor) -> Tensor:
        """All ranks' logits [R, V] on every rank, from each rank's ``logits``. One all-gather."""
        return gather_logits(local_RV, self.config.vocab_size, self.collectives)

    def _planned(self, inputs: StepInputs, kv_layer: Tensor) -> StepInputs:
        attention = inputs.attention
        if not isinstance(attention, PrefillAttention) or attention.planned is not None:
            return inputs
        heads = self._heads
        planned = self.kernels.plan_prefill(
            attention, heads.local_heads, heads.local_kv_heads, self.config.head_dim, kv_layer
        )
        return replace(inputs, attention=planned)

    def _with_real_tokens(self, inputs: StepInputs, kv_layer: Tensor) -> StepInputs:
        """Masked tokens write into page 0, and only they do; experts leave them out."""
        if self.config.experts is None or inputs.real_T is not None:
            return inputs
        return replace(inputs, real_T=inputs.kv_slots_T >= kv_layer.shape[2])

    def checkpoint_shards(self, stored: Container[str] = ()) -> dict[str, Shard | ScatteredShard]:
        """Checkpoint tensor name -> what this rank holds of it. Covers every parameter exactly once.

        Where a module may be filled from differently named or cut tensors, those that are in ``stored`` are meant.
        """
        found: dict[str, Shard | ScatteredShard] = {}
        for path, module in self.named_modules():
            if isinstance(module, ShardedModule):
                spelled = [names for form in module.forms() for names in self._spellings(path, form)]
                found |= next((names for names in spelled if any(name in stored for name in names)), spelled[0])
        return found

    def checkpoint_copies(self) -> dict[str, Shard]:
        """Checkpoint tensors that may be there but only repeat another one: the head of a tied model."""
        if not self.config.tied_embeddings:
            return {}
        return {self._checkpoint_names("lm_head.weight")[0]: self.embedding.shards()["weight"]}

    def _spellings(
        self, path: str, form: Mapping[str, Shard | ScatteredShard]
    ) -> list[dict[str, Shard | ScatteredShard]]:
        """Every way in which checkpoints name the parts of ``form``."""
        names = {part: self._checkpoint_names(f"{path}.{part}") for part in form}
        count = max(map(len, names.values()), default=1)
        return [{names[part][n % len(names[part])]: shard for part, shard in form.items()} for n in range(count)]

    def _checkpoint_names(self, path: str) -> tuple[str, ...]:
        """``layers.3.mlp.down.weight`` -> (``model.layers.3.mlp.down_proj.weight``,)."""
        part, kind = path.rsplit(".", 1)
        pieces = part.split(".")
        numbers = [piece for piece in pieces if piece.isdigit()]
        found = self.checkpoint_names[".".join("{}" if piece.isdigit() else piece for piece in pieces)]
        return tuple(f"{name.format(*numbers)}.{kind}" for name in ((found,) if isinstance(found, str) else found))
