"""What drafters have besides decoder layers: projections, and the target's head, rows of it, or their own head.

Knows: which draft ids a rank's logits stand for, and which ids of the target these are. A draft vocabulary is split
over ranks evenly, as a whole one is: whichever ids it has, each rank computes as many. Does not know: drafters, who
draws.
Shape letters: R rows, N hidden size, V draft ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from parallel.comm.collectives import Collectives, PendingAllReduce
from parallel.comm.quantised import Activations, numbers_of
from parallel.layers.embedding import LMHead, gather_logits
from parallel.layers.linear import RowParallel
from parallel.layers.shard import Shard, ShardedModule, VocabShard, whole


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
        self,
        project: Callable[[Tensor], Tensor],
        vocab: VocabShard,
        collectives: Collectives,
        ids_V: Tensor | None = None,
    ) -> None:
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
