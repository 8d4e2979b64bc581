"""The products that are tuned are those that the models ask for, rank by rank; no GPU needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")

from models.config import ModelConfig
from models.inputs import DecodeAttention, StepInputs
from models.kernels.interface import Rotation
from models.kernels.matmul.choice_table import Blas, Choice, LinearShape
from models.kernels.matmul.dispatch import MatmulDispatch
from models.kernels.nvidia import NvidiaKernels
from models.kernels.reference import ReferenceKernels
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.registry import model_class
from parallel.comm.collectives import Collectives, SingleRank
from parallel.comm.peer_buffers import PeerBuffers
from tests.bench.dense_shapes import BF16, FOLDERS, MODELS, SHAPES, Dense
from tests.models.kernels.rank_without_gpu import FirstRank

ROWS = (1, 8, 32, 64, 128, 256)
PAGE = 16
PRODUCTS = 4  # of a layer
RANKS = [(name, rank) for name, dense in MODELS.items() for rank in sorted({0, dense.ranks - 1})]


class AskedMatmul(MatmulDispatch):
    """Notes the shape of every product that it is asked for, and computes none."""

    def __init__(self) -> None:
        self.shapes: list[LinearShape] = []

    def choice(self, shape: LinearShape) -> Choice:
        self.shapes.append(shape)
        return Blas()

    def run(
        self,
        x_MK: Tensor,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        choice: Choice,
        *,
        gate_up: bool,
        buffers: PeerBuffers | None = None,
    ) -> Tensor:
        assert x_MK.shape[1] == weight_OK.shape[1]
        return x_MK.new_empty(len(x_MK), len(weight_OK) // (2 if gate_up else 1))

    def run_normed(
        self,
        x_MK: Tensor,
        residual_MK: Tensor | None,
        norm_K: Tensor,
        eps: float,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        choice: Choice,
        *,
        gate_up: bool,
    ) -> tuple[Tensor, Tensor]:
        return self.run(x_MK, weight_OK, bias_O, choice, gate_up=gate_up), x_MK


class Asked(NvidiaKernels):
    """Reference kernels but for products, which it notes."""

    rms_norm = ReferenceKernels.rms_norm
    add_rms_norm = ReferenceKernels.add_rms_norm
    silu_mul = ReferenceKernels.silu_mul
    vocab_rows = ReferenceKernels.vocab_rows

    def __init__(self) -> None:
        self._reference = ReferenceKernels()
        self._asked = self.matmul = AskedMatmul()
        self.balanced = False  # the reference needs no list

    @property
    def shapes(self) -> list[LinearShape]:
        return self._asked.shapes

    def rope_cache_attend(
        self,
        qkv_TX: Tensor,
        heads: int,
        kv_layer: Tensor,
        rotation: Rotation,
        inputs: DecodeAttention,
        scale: float,
    ) -> Tensor:
        return self._reference.rope_cache_attend(qkv_TX, heads, kv_layer, rotation, inputs, scale)


class OneOf(FirstRank):
    """Any of the ranks; nothing is summed."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(size)
        self.rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_norm(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, *, pushed: bool = False
    ) -> tuple[Tensor, Tensor]:
        return x_TN, x_TN


def built(name: str, rank: int) -> tuple[Decoder, Asked]:
    """Two layers of one rank's share on the meta device; the first has no residual yet."""
    folder, size = SHAPES / FOLDERS[name.split("-tp")[0]], MODELS[name].ranks
    config = dataclasses.replace(ModelConfig.from_folder(folder), layers=2)
    collectives: Collectives = SingleRank() if size == 1 else OneOf(rank, size)
    kernels = Asked()
    with torch.device("meta"):
        return model_class(config.architecture)(config, ModelContext(collectives, kernels, BF16)), kernels


def decode(model: Decoder, rows: int) -> None:
    numbers = torch.zeros(rows, dtype=torch.int64, device="meta")
    attention = DecodeAttention(torch.zeros(rows, 4, dtype=torch.int32, device="meta"), numbers.int(), 1, 4 * PAGE)
    pools = [torch.empty(kv.shape(8, PAGE), dtype=BF16, device="meta") for kv in model.cache_layout.paged]
    with torch.no_grad():
        model.logits(model(StepInputs(numbers, numbers, numbers, attention), pools))


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_products_are_those_that_a_rank_asks_for(name: str, rank: int) -> None:
    model, kernels = built(name, rank)
    dense = MODELS[name]
    for rows in ROWS:
        kernels.shapes.clear()
        decode(model, rows)
        assert kernels.shapes[PRODUCTS:] == list(dense.products(rows).values())
    kv = model.cache_layout.paged[0]
    assert (kv.kv_heads, kv.head_dim) == (dense.kv_heads, dense.head_dim)
    assert len(model.embedding.weight) == dense.vocab


def test_a_model_is_that_of_its_folder() -> None:
    assert MODELS["8B"] == Dense(4096, 36, 32, 8, 12288)
    assert MODELS["32B-tp8"] == Dense(5120, 64, 8, 1, 3200, vocab=18992, ranks=8)
    assert (MODELS["8B-tp4"].products(8)["qkv"].key, MODELS["8B-tp4"].products(8)["gate-up"].key) == (
        "bfloat16 1536x4096 x8",
        "bfloat16 6144x4096 gate_up x8",
    )


def test_shares_are_rounded_as_layers_round_them() -> None:
    """The vocabulary is padded to whole shares, key and value heads are held by several ranks, the rest is refused."""
    small = Dense(64, 2, 8, 2, 48, vocab=101, head_dim=8)
    share = small.split(4)
    assert (share.heads, share.kv_heads, share.intermediate, share.vocab) == (2, 1, 12, 26)
    with pytest.raises(ValueError, match="intermediate features cannot be split evenly over 4"):
        dataclasses.replace(small, intermediate=50).split(4)
