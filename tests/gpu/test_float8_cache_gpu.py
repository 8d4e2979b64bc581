"""A float8 KV cache on a GPU: every kernel that takes one against plain torch over the same codes, and whole engines.

Run: python3 -m pytest -m gpu tests/gpu/test_float8_cache_gpu.py
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention
from models.kernels.interface import AttentionKind, Rotation
from models.kv_group import FP8
from tests.gpu.test_deterministic_gpu import gpu_rig
from tests.models.kv_layers import empty_kv_layer
from tests.plant import reference_kernels
from tests.runtime.engine.same_bits import CONDITIONS, answers, difference, plainly, questions

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from models.kernels.attention import rope_decode, rope_prefill
    from tests.models.kernels.nvidia_kernels import InvariantNvidia, Nvidia, invariant_nvidia_kernels, nvidia_kernels

REFERENCE = reference_kernels()
BF16 = torch.bfloat16
DEVICE = "cuda"
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64


@pytest.fixture(scope="module")
def kernels() -> Nvidia:
    return nvidia_kernels(DEVICE, prefill="triton")


@pytest.fixture(scope="module")
def invariant() -> InvariantNvidia:
    return invariant_nvidia_kernels(DEVICE)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(BF16)


class Pages:
    """Codes of rows of ``lengths`` tokens in shuffled pages; codes of NaN everywhere else."""

    def __init__(self, lengths: list[int]) -> None:
        torch.manual_seed(0)
        width = -(-max(lengths) // PAGE)
        self.most, self.lengths = width * PAGE, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.table = (torch.randperm(len(lengths) * width, device=DEVICE) + 1).int().view(len(lengths), width)
        wide = empty_kv_layer(1 + self.table.numel(), PAGE, KV_HEADS, DIM, BF16, DEVICE).fill_(math.nan)
        for row, length in enumerate(lengths):
            wide.flatten(1, 2)[:, self.slots(row, length)] = randn(2, length, KV_HEADS, DIM)
        self.kv = wide.to(FP8)

    def slots(self, row: int, length: int) -> Tensor:
        at = torch.arange(length, device=DEVICE)
        return self.table[row, at // PAGE].long() * PAGE + at % PAGE

    def decode(self, new: int, **more: Any) -> DecodeAttention:
        return DecodeAttention(self.table, self.lengths, new, self.most, **more)


def stored_alike(found_kv: Tensor, expected_kv: Tensor) -> None:
    """Few codes differ, and by one step: what products round differently. Next to zero, where products cancel, a step
    is a small part of what was rounded, so there a difference has a bound of its own. A step is 2^-4 to 2^-3 of a
    number and bfloat16 rounds by up to 2^-9: a thirtieth of the codes may differ."""
    found, expected = found_kv.float(), expected_kv.float()
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.nan_to_num(), expected.nan_to_num()
    assert ((found - expected).abs() <= expected.abs() / 8 + 2.0**-5).all(), "one step of the last bit"
    assert float((found != expected).float().mean()) < 1 / 30


def close(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.01, f"relative error {error:.1e}"


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tokens", [3, 700])
def test_rotation_stores_what_the_reference_stores(tokens: int, scaled: bool) -> None:
    qkv, norms = randn(tokens, (HEADS + 2 * KV_HEADS) * DIM), randn(2, DIM)
    qkv[0, -1], qkv[1, -1], qkv[2, -1] = 30_000.0, -30_000.0, math.nan
    at = torch.arange(tokens, device=DEVICE)
    factors = torch.rand(2, KV_HEADS, device=DEVICE) + 0.5 if scaled else None
    turn = Rotation(norms[0], norms[1], 1e-6, torch.randn(tokens, DIM, device=DEVICE), at, at + PAGE, factors)
    empty = empty_kv_layer(2 + tokens // PAGE, PAGE, KV_HEADS, DIM, FP8, DEVICE)
    expected = empty.clone()
    q = REFERENCE.rope_and_cache(qkv, HEADS, expected, turn)
    for run in (rope_decode.rope_and_cache, rope_prefill.rope_and_cache):
        held = empty.clone()
        close(run(qkv, HEADS, held, turn, True), q)
        stored_alike(held, expected)
        flat = held.flatten(1, 2)[1, PAGE : PAGE + 3, -1, -1].float()
        assert flat[2].isnan()
        assert scaled or flat[:2].tolist() == [448, -448]


@pytest.mark.parametrize(
    ("rows", "new", "tree"),
    [(1, 1, False), (8, 1, False), (64, 1, False), (256, 1, False), (8, 4, False), (32, 8, False), (4, 16, True)],
)
def test_decode_and_windows(kernels: Nvidia, rows: int, new: int, tree: bool) -> None:
    """Alone and after a plan; of lengths that differ."""
    pages = Pages([new + (97 * row) % 1500 for row in range(rows)])
    seen = torch.randint(0, 2**15, (rows, new), dtype=torch.int32, device=DEVICE) if tree else None
    q, scale = randn(rows * new, HEADS, DIM), DIM**-0.5
    inputs = pages.decode(new, tree_BQ=seen)
    expected = REFERENCE.decode_attention(q, pages.kv, inputs, scale)
    for planned in (inputs, kernels.plan_decode(inputs, HEADS, pages.kv)):
        close(kernels.decode_attention(q, pages.kv, planned, scale), expected)
    assert not kernels.attention_counters.any()


def test_prompts_and_the_deterministic_mode(kernels: Nvidia, invariant: InvariantNvidia) -> None:
    pages = Pages([900, 1300, 77])
    new = (900, 200, 1)
    q, scale = randn(sum(new), HEADS, DIM), DIM**-0.5
    inputs = PrefillAttention(pages.table, new, (900, 1300, 77))
    expected = REFERENCE.prefill_attention(q, pages.kv, inputs, scale)
    for each in (kernels, invariant):
        planned = each.plan_prefill(inputs, HEADS, pages.kv)
        found = each.prefill_attention(q, pages.kv, planned, scale)
        close(found, expected)
    last = q[[899, 1099, 1100]]
    one = invariant.decode_attention(last, pages.kv, pages.decode(1), scale)
    assert torch.equal(one, found[[899, 1099, 1100]])


@pytest.mark.parametrize(("rows", "new"), [(1, 1), (8, 1), (64, 1), (256, 1), (8, 4)])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_sliding_windows_and_sinks(kernels: Nvidia, rows: int, new: int, cap: float | None) -> None:
    pages = Pages([new + (97 * row) % 1500 for row in range(rows)])
    kind = AttentionKind(200, cap, torch.randn(HEADS, device=DEVICE))
    q, inputs = randn(rows * new, HEADS, DIM), pages.decode(new)
    expected = REFERENCE.decode_attention(q, pages.kv, inputs, DIM**-0.5, kind=kind)
    planned = kernels.plan_decode(inputs, HEADS, pages.kv, kind)
    close(kernels.decode_attention(q, pages.kv, planned, DIM**-0.5, kind=kind), expected)
    assert not kernels.attention_counters.any()


@pytest.mark.parametrize("rows", [4, 32, 128])
def test_folded_into_attention(kernels: Nvidia, rows: int) -> None:
    """The newest key is read as the cache holds it; by pointers, and by TMA with two warps and with one."""
    pages = Pages([1, 700, 64, 65] * (rows // 4))
    qkv, norms = randn(rows, (HEADS + 2 * KV_HEADS) * DIM), randn(2, DIM)
    at = pages.lengths.long() - 1
    slots = torch.stack([pages.slots(row, int(length))[-1] for row, length in enumerate(pages.lengths)])
    turn = Rotation(norms[0], norms[1], 1e-6, torch.randn(2048, DIM, device=DEVICE), at, slots)
    written, inputs = pages.kv.clone(), kernels.plan_decode(pages.decode(1), HEADS, pages.kv)
    q = REFERENCE.rope_and_cache(qkv, HEADS, written, turn)
    expected = REFERENCE.decode_attention(q, written, pages.decode(1), DIM**-0.5)
    close(kernels.rope_cache_attend(qkv, HEADS, pages.kv, turn, inputs, DIM**-0.5), expected)
    stored_alike(pages.kv, written)


@pytest.mark.slow
def test_chunks_prefix_hits_and_evictions_change_no_bit() -> None:
    """Whole engines in the deterministic mode, captured."""
    over, requests = partial(gpu_rig, "dense", kv_dtype=FP8), questions(1, 24, longest=60)
    expected = plainly(over, requests)
    for name, limits, counter in (CONDITIONS[2], CONDITIONS[4]):
        with over(**limits) as engine:
            found = answers(engine, requests)
            assert engine.counters[counter] > 0, name
        told = difference(found, expected)
        assert (told.flips, told.bits) == (0, 0), f"{name}: {told}"
