"""KV blocks copied in Triton against the same in torch, bit for bit, and nothing beside them touched.

Without a GPU, as CI does it: ``make interpreted``.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from runtime.execute.cache import block_copy
from runtime.execute.cache.block_copy import BlockCopier

triton_copy = pytest.importorskip("runtime.execute.cache.block_copy_triton").copy_blocks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.models.kernels.interpreted_kernels")  # mends Triton's interpreter for today's numpy
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [(16, 8, 128), (8, 2, 16), (1, 1, 6), (64, 1, 100)]  # block size, key/value heads, head_dim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, with which the interpreter computes
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pairs", [((3, 7),), ((3, 7), (3, 1), (5, 8)), ((0, 0), (2, 4), (0, 0))], ids=str)
def test_blocks_are_copied_in_every_layer(
    pairs: tuple[tuple[int, int], ...], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    layers = [torch.randn(2, 9, *shape, device=DEVICE).to(dtype) for _ in range(3)]
    expected = [layer.clone() for layer in layers]
    pairs_2C = torch.tensor(pairs, device=DEVICE).T.contiguous()
    for layer in expected:
        layer[:, pairs_2C[1]] = layer[:, pairs_2C[0]]
    if INTERPRETED:
        addresses_L = torch.tensor([layer.data_ptr() for layer in layers])
        triton_copy(addresses_L, pairs_2C, 9, layers[0][0, 0].nbytes // 4)
    else:
        copier = BlockCopier(layers)
        assert copier._kernel is triton_copy
        copier.copy(pairs_2C)
    assert all(torch.equal(layer, wanted) for layer, wanted in zip(layers, expected, strict=True))


@pytest.mark.parametrize("shape", [(4, 40, 128), (17, 33, 32), (3, 6)], ids=str)
def test_rows_of_a_bank_are_copied_in_every_layer(shape: tuple[int, ...]) -> None:
    """States are larger than blocks: several programs copy one, and the last has less to do."""
    bank = torch.randn(5, 6, *shape, device=DEVICE)
    expected = bank.clone()
    expected[:, [4, 1]] = bank[:, [2, 5]]
    pairs_2C = torch.tensor([[2, 5], [4, 1]], device=DEVICE)
    if INTERPRETED:
        triton_copy(torch.tensor([bank.data_ptr()]), pairs_2C, 6, bank[0, 0].nbytes // 4, 5)
    else:
        copier = BlockCopier([bank])
        assert copier._kernel is triton_copy
        copier.copy(pairs_2C)
    assert torch.equal(bank, expected)


def test_torch_copies_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "_triton_kernel", lambda: None)
    layer = torch.randn(2, 9, 4, 2, 8, device=DEVICE)
    expected = layer.clone()
    expected[:, [7, 1]] = layer[:, [3, 3]]
    BlockCopier([layer]).copy(torch.tensor([[3, 3], [7, 1]], device=DEVICE))
    assert torch.equal(layer, expected)
