"""What drafters have besides decoder layers: projections; the target's head, rows of it, or their own head; attention
with entries for tokens whose keys come from the target's states, and queries of draft tokens.

Knows: which draft ids a rank's logits stand for, and which ids of the target these are. A draft vocabulary is split
over ranks evenly, as a whole one is: whichever ids it has, each rank computes as many. Does not know: drafters, who
draws.
Shape letters: R rows, N hidden size, V draft ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.drafters.draft_config import BlockView
from models.inputs import DecodeAttention, MixedAttention, PrefillAttention, StepInputs
from models.kernels.interface import Rotation
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from parallel.comm.collectives import Collectives, PendingAllReduce
from parallel.comm.quantised import Activations, Quantised, numbers_of
from parallel.layers.embedding import LMHead, gather_logits
from parallel.layers.linear import RowParallel
from parallel.layers.shard import Shard, ShardedModule, VocabShard, whole

_ONLY_ROWS = "a drafter guesses for rows of DecodeAttention"


class DraftAttention(Attention):
    """As a target's attention, over rows of DecodeAttention only. ``view``: what the rows of a block see."""

    def __init__(self, *arguments: Any, view: BlockView | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.view = view or BlockView(causal=True)

    def append(self, x_TN: Tensor, positions_T: Tensor, kv_slots_T: Tensor, kv_layer: Tensor) -> None:
        """Writes keys and values of ``x`` (normed where the layer norms) at its positions; nothing attends."""
        self.write(self.kernels.linear(x_TN, self.entry_rows), positions_T, kv_slots_T, kv_layer)

    def write(self, kv_TX: Tensor, positions_T: Tensor, kv_slots_T: Tensor, kv_layer: Tensor) -> None:
        """Writes keys and values made by ``entry_rows`` at their positions; ``kv`` may be columns of a wider tensor."""
        self.kernels.rope_and_cache(kv_TX, 0, kv_layer, self._rotation(positions_T, kv_slots_T))

    def attend(self, qkv_TX: Tensor, inputs: StepInputs, kv_layer: Tensor) -> Tensor:
        """Rotates, writes the cache, attends; [T, H, D]. TypeError for other rows than DecodeAttention's."""
        if not isinstance(inputs.attention, DecodeAttention):
            raise TypeError(_ONLY_ROWS)
        rotation = self._rotation(inputs.positions_T, inputs.kv_slots_T)
        return self._attend_rows(qkv_TX, rotation, inputs.attention, kv_layer)

    def _room_for_codes(self, tokens: int, dtype: torch.dtype) -> Quantised | None:
        return super()._room_for_codes(tokens, dtype) if self.view.window is None else None

    def _attend_rows(
        self, qkv_TX: Tensor, rotation: Rotation, attention: DecodeAttention, kv_layer: Tensor,
        into: Quantised | None = None,
    ) -> Tensor:  # fmt: skip
        attention = replace(attention, causal=self.view.causal)
        if self.view.window is None:
            return super()._attend_rows(qkv_TX, rotation, attention, kv_layer, into)
        q_THD = self._rotate(qkv_TX, kv_layer, rotation)
        out_THD = self.kernels.window_attention(q_THD, kv_layer, attention, self.scale, self.view.window)
        return self._scaled(out_THD)

    def _attend_chunks(self, q_THD: Tensor, attention: PrefillAttention | MixedAttention, kv_layer: Tensor) -> Tensor:
        raise TypeError(_ONLY_ROWS)


class Projection(ShardedModule):
    """y = x W^T, [T, inputs] -> [T, outputs]; every rank holds all of W."""

    def __init__(self, inputs: int, outputs: int, context: ModelContext) -> None:
        super().__init__()
        self._kernels = context.kernels
        self.weight = context.weight(outputs, inputs)

    def forward(self, x_TN: Tensor) -> Tensor:
        return self._kernels.linear(x_TN, self.weight)

    def shards(self) -> dict[str, Shard]:
        return {"weight": whole(self.weight.cells)}


class SplitProjection(RowParallel):
    """Projection of which each rank holds and multiplies its share of the inputs' columns, and one all-reduce adds the
    parts up. ``what`` as in RowParallel; the inputs [T, inputs] are whole on every rank.
    """

    def __init__(self, inputs: int, outputs: int, context: ModelContext, what: str) -> None:
        super().__init__(inputs, outputs, context, what=what)

    def forward(self, x_TI: Activations) -> Tensor | PendingAllReduce:
        return super().forward(numbers_of(x_TI).narrow(1, self.features.start, self.features.count))


_ROWS_AT_ONCE = 2048  # of the target's head that ranks send each other


class DraftHead:
    """``vocab``: this rank's draft ids. ``ids_V``: the target's id of each (int64); None where it is the same."""

    def __init__(
        self, project: Callable[[Tensor], Tensor], vocab: VocabShard, collectives: Collectives,
        ids_V: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._project = project
        self.vocab = vocab
        self.collectives = collectives
        self.ids_V = ids_V

    @classmethod
    def of_target(cls, target: Decoder) -> DraftHead:
        """The target's own, whole."""
        return cls(target.logits, target.vocab_shard, target.collectives)

    @classmethod
    def rows_of(cls, target: Decoder, ids: Sequence[int]) -> DraftHead:
        """A copy of the rows of ``ids``, different ids of the target. Called by all ranks together: they have a part of
        the rows each, and need others."""
        device = target.final_norm.weight.device
        ids_V = torch.tensor(ids, dtype=torch.int64, device=device)
        with torch.device(device):
            context = ModelContext(target.collectives, target.kernels, target.dtype, target.expert_split)
            head = LMHead(len(ids), target.config.hidden_size, context)
        first, last = head.vocab.start, head.vocab.end
        for begin in range(0, len(ids), _ROWS_AT_ONCE):
            rows_VN = target.lm_head.rows(ids_V[begin : begin + _ROWS_AT_ONCE])
            start, end = max(first, begin), min(last, begin + len(rows_VN))
            if start < end:
                head.weight.data[start - first : end - first].copy_(rows_VN[start - begin : end - begin])
        return cls.of_head(head, ids_V, target)

    @classmethod
    def of_head(cls, head: LMHead, ids_V: Tensor | None, target: Decoder) -> DraftHead:
        """A head of the drafter's own. ``ids_V``: see above."""
        return cls(head, head.vocab, target.collectives, ids_V)

    @property
    def size(self) -> int:
        """Draft ids of all ranks."""
        return self.vocab.vocab_size

    def logits(self, hidden_RN: Tensor) -> Tensor:
        """This rank's logits [R, V_local]; padding columns are -inf."""
        return self._project(hidden_RN)

    def all_logits(self, hidden_RN: Tensor) -> Tensor:
        """[R, V] by draft id, on every rank. One all-gather if ranks are several."""
        local_RV = self.logits(hidden_RN)
        return gather_logits(local_RV, self.size, self.collectives) if self.collectives.size > 1 else local_RV

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """int64, of draft ids (int64) that there are."""
        return draft_ids if self.ids_V is None else self.ids_V[draft_ids]
