"""Vocabulary-parallel layers: token embedding, output head, and the all-gather of logits.

Knows: which token ids a rank holds, and the padding rows.
Does not know: models, sampling, or who needs gathered or local logits.
Shape letters: T tokens, R rows that need logits, N hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.comm.collectives import Collectives
from parallel.layers.shard import Shard, ShardContext, ShardedModule, VocabShard, rows_of
from parallel.layers.weight import Weight


class VocabParallelEmbedding(ShardedModule):
    """Token embedding times ``scale``, [T] int64 -> [T, N]; each rank holds a range of ids. One all-reduce if ranks are
    several.
    """

    def __init__(self, vocab_size: int, hidden_size: int, placement: ShardContext, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.placement = placement
        self.vocab = VocabShard(vocab_size, placement.rank, placement.size)
        self.weight = _vocab_weight(self.vocab, hidden_size, placement)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        rows_TN = _rows(self.weight, self.vocab, token_ids_T, self.placement)
        return rows_TN if self.scale == 1.0 else rows_TN * self.scale

    def shards(self) -> dict[str, Shard]:
        return rows_of("", self.weight.rows(0, self.vocab.rows), self.vocab.vocab_size, self.vocab.start)


class LMHead(ShardedModule):
    """Logits of this rank's token ids, [R, N] -> [R, V_local]; padding logits are -inf; no communication.

    ``tied_to`` shares the weight of an embedding; the head then has no checkpoint tensor of its own. Logits are
    multiplied by ``scale``, and then become softcap tanh(logits / softcap) where there is a ``softcap``.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, placement: ShardContext, tied_to: VocabParallelEmbedding | None = None,
        *, scale: float = 1.0, softcap: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale, self.softcap = scale, softcap
        self.placement = placement
        self.vocab = VocabShard(vocab_size, placement.rank, placement.size)
        self.tied = tied_to is not None
        self.weight = tied_to.weight if tied_to else _vocab_weight(self.vocab, hidden_size, placement)

    def forward(self, hidden_RN: Tensor) -> Tensor:
        logits_RV = self.placement.kernels.linear(hidden_RN, self.weight)
        if self.scale != 1.0:
            logits_RV = logits_RV * self.scale
        if self.softcap is not None:
            logits_RV = torch.tanh(logits_RV / self.softcap) * self.softcap
        if self.vocab.rows < self.vocab.width:
            logits_RV[:, self.vocab.rows :] = float("-inf")
        return logits_RV

    def rows(self, token_ids_T: Tensor) -> Tensor:
        """The rows of these ids (int64) on every rank, [T, N]. One all-reduce if ranks are several."""
        return _rows(self.weight, self.vocab, token_ids_T, self.placement)

    def shards(self) -> dict[str, Shard]:
        if self.tied:
            return {}
        return rows_of("", self.weight.rows(0, self.vocab.rows), self.vocab.vocab_size, self.vocab.start)


def gather_logits(local_RV: Tensor, vocab_size: int, collectives: Collectives) -> Tensor:
    """All-gathers local logits [R, V_local] -> [R, V] in token-id order on every rank, without padding."""
    return collectives.all_gather(local_RV)[..., :vocab_size]


def _rows(weight: Weight, vocab: VocabShard, token_ids_T: Tensor, placement: ShardContext) -> Tensor:
    """[T, N], of a matrix with a row a token id, of which each rank has some."""
    held_TN = placement.kernels.vocab_rows(weight, token_ids_T, vocab.start, vocab.rows)
    return held_TN if vocab.size == 1 else placement.collectives.all_reduce(held_TN)


def _vocab_weight(vocab: VocabShard, hidden_size: int, placement: ShardContext) -> Weight:
    """[width, N] with zero padding rows: they take part in the product, so they must be finite."""
    weight = placement.weight(vocab.width, hidden_size, fixed=True)
    weight.data[vocab.rows :].zero_()
    return weight
