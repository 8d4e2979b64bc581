"""The products of a decode step of a dense model, as one rank of several computes them.

Knows: sizes, from models/shapes; a rank's share of them, by the arithmetic of its layers (parallel/layers/shard.py);
and for how many rows a sum over the ranks takes the norm behind it along, so that the product after it has none in
front. Does not know: kernels, or how they are measured. test_dense_shapes.py compares all this with the layers
themselves.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from models.config import ModelConfig
from models.kernels.matmul.choice_table import LinearShape
from parallel.comm.all_reduce_dispatch import SIZE_LIMITS, shots_for
from parallel.layers.shard import HeadShard, VocabShard, even_share

BF16 = torch.bfloat16
SHAPES = Path(__file__).resolve().parents[2] / "models" / "shapes"


@dataclasses.dataclass(frozen=True)
class Dense:
    """The shapes of one rank's share of a dense model. ``ranks``: how many share it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 151936
    head_dim: int = 128
    ranks: int = 1

    @property
    def layer_bytes(self) -> int:
        return 2 * sum(outputs * inner for outputs, inner in self.weights().values())

    def split(self, ranks: int) -> Dense:
        """What each of ``ranks`` has of a whole model."""
        heads = HeadShard(self.heads, self.kv_heads, 0, ranks)
        return dataclasses.replace(
            self,
            heads=heads.local_heads,
            kv_heads=heads.local_kv_heads,
            intermediate=even_share("intermediate features", self.intermediate, ranks),
            vocab=VocabShard(self.vocab, 0, ranks).width,
            ranks=ranks,
        )

    def weights(self) -> dict[str, tuple[int, int]]:
        """(outputs, inner) of every product of a layer."""
        packed = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (packed, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate-up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    def norms_apart(self, rows: int) -> bool:
        """Whether the norms of ``rows`` tokens belong to the sums before them, not to the products behind them."""
        return self.ranks > 1 and shots_for(SIZE_LIMITS[self.ranks], rows, self.hidden, BF16) is not None

    def products(self, rows: int) -> dict[str, LinearShape]:
        """Every product of a step of ``rows`` tokens as the models ask for it, the first layer's qkv aside."""
        normed = () if self.norms_apart(rows) else ("qkv", "gate-up")
        asked = {
            name: LinearShape(rows, *size, BF16, normed=name in normed, gate_up=name == "gate-up")
            for name, size in self.weights().items()
        }
        return asked | {"head": LinearShape(rows, self.vocab, self.hidden, BF16)}


def whole(folder: str) -> Dense:
    """The model of models/shapes/``folder``."""
    config = ModelConfig.from_folder(SHAPES / folder)
    return Dense(
        config.hidden_size,
        config.layers,
        config.heads,
        config.kv_heads,
        config.intermediate_size,
        config.vocab_size,
        config.head_dim,
    )


FOLDERS = {"8B": "qwen3-8b", "0.6B": "qwen3-0.6b", "32B": "qwen3-32b"}
MODELS = {name: whole(folder) for name, folder in FOLDERS.items()}
MODELS |= {f"{name}-tp{ranks}": MODELS[name].split(ranks) for name in ("8B", "32B") for ranks in (2, 4, 8)}
