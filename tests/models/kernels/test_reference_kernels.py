"""The reference kernels against the plainest possible statement of each operation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention
from models.kernels.interface import Rotation
from tests.models.kv_layers import empty_kv_layer
from tests.plant import Kernels, invariant_kernels, reference_kernels

KERNELS = reference_kernels()
HEADS, KV_HEADS, DIM, PAGE = 6, 2, 10, 4
DTYPES = [torch.float32, torch.bfloat16]


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    """bfloat16 has 8 bits, so one rounding is up to 2^-9 of the value; float32 sums differ in order only."""
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def filled_cache(dtype: torch.dtype, pages: int = 20) -> Tensor:
    return rand(2, pages, PAGE, KV_HEADS, DIM, seed=1, dtype=dtype)


def plain_attention(q_QHD: Tensor, cache: Tensor, pages: list[int], length: int, scale: float) -> Tensor:
    """The last Q of ``length`` tokens, one query and head at a time, in float64."""
    rows = [pages[i // PAGE] * PAGE + i % PAGE for i in range(length)]
    keys, values = cache.double().flatten(1, 2)[:, rows]
    out = torch.empty_like(q_QHD, dtype=torch.float64)
    for i in range(q_QHD.shape[0]):
        seen = length - q_QHD.shape[0] + i + 1
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            weights = (keys[:seen, group] @ q_QHD[i, head].double() * scale).softmax(0)
            out[i, head] = weights @ values[:seen, group]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, residual, weight = rand(5, 24, dtype=dtype), rand(5, 24, seed=1, dtype=dtype), rand(24, seed=2, dtype=dtype)
    total = x + residual
    expected = total.double() / (total.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    close(KERNELS.rms_norm(total, weight, 1e-3), expected)
    normed, new_residual = KERNELS.add_rms_norm(x.clone(), residual.clone(), weight, 1e-3)
    close(normed, expected)
    assert torch.equal(new_residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = rand(5, 16, dtype=dtype)
    close(KERNELS.silu_mul(x), F.silu(x[:, :8].double()) * x[:, 8:].double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [DIM, 4])
@pytest.mark.parametrize("normed", [True, False])
def test_rope_and_cache(dtype: torch.dtype, rotary: int, normed: bool) -> None:
    tokens = 7
    qkv = rand(tokens, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    q_norm, k_norm = (rand(DIM, seed=seed, dtype=dtype) if normed else None for seed in (3, 4))
    angles = torch.arange(50.0)[:, None] * torch.linspace(0.1, 1.0, rotary // 2)
    positions, kv_slots = torch.tensor([3, 0, 49, 7, 8, 9, 10]), torch.tensor([9, 4, 33, 12, 13, 14, 15])
    cache = empty_kv_layer(10, PAGE, KV_HEADS, DIM, dtype, "cpu")
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    q = KERNELS.rope_and_cache(qkv, HEADS, cache, Rotation(q_norm, k_norm, 1e-6, cos_sin, positions, kv_slots))

    def rotated(x_TKD: Tensor, norm: Tensor | None) -> Tensor:
        x = x_TKD if norm is None else KERNELS.rms_norm(x_TKD, norm, 1e-6)
        pairs = torch.complex(x[..., : rotary // 2].double(), x[..., rotary // 2 : rotary].double())
        turned = pairs * torch.polar(torch.ones(1).double(), angles[positions, None].double())
        return torch.cat((turned.real, turned.imag, x[..., rotary:].double()), -1)

    heads = qkv.view(tokens, -1, DIM)
    close(q, rotated(heads[:, :HEADS], q_norm))
    close(cache[0].flatten(0, 1)[kv_slots], rotated(heads[:, HEADS : HEADS + KV_HEADS], k_norm))
    assert torch.equal(cache[1].flatten(0, 1)[kv_slots], heads[:, HEADS + KV_HEADS :])
    untouched = [i for i in range(40) if i not in kv_slots.tolist()]
    assert not bool(cache.flatten(1, 2)[:, untouched].any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [1, 3])
def test_decode_attention(dtype: torch.dtype, query_len: int) -> None:
    lengths, tables = [3, 12, 9], [[5, 0, 0], [7, 2, 11], [19, 1, 4]]
    q, cache = rand(3 * query_len, HEADS, DIM, dtype=dtype), filled_cache(dtype)
    inputs = DecodeAttention(
        torch.tensor(tables, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), query_len, 12
    )
    out = KERNELS.decode_attention(q, cache, inputs, 0.3)
    rows = zip(q.view(3, query_len, HEADS, DIM), tables, lengths, strict=True)
    close(out, torch.cat([plain_attention(part, cache, pages, length, 0.3) for part, pages, length in rows]))


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("lengths", [[0, 5], [0, 0]])
def test_rows_without_tokens_stay_finite_and_disturb_nobody(query_len: int, lengths: list[int]) -> None:
    q, cache = rand(2 * query_len, HEADS, DIM), filled_cache(torch.float32)
    table = torch.tensor([[0, 0], [3, 4]], dtype=torch.int32)
    out = KERNELS.decode_attention(
        q, cache, DecodeAttention(table, torch.tensor(lengths, dtype=torch.int32), query_len, 8), 0.3
    )
    assert bool(out.isfinite().all())
    if lengths[1]:
        close(out[query_len:], plain_attention(q[query_len:], cache, [3, 4], lengths[1], 0.3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_attention(dtype: torch.dtype) -> None:
    new, lengths, tables = [3, 1, 8, 4], [3, 9, 8, 11], [[5, 0, 0], [7, 2, 11], [19, 1, 0], [8, 9, 10]]
    q, cache = rand(sum(new), HEADS, DIM, dtype=dtype), filled_cache(dtype)
    inputs = PrefillAttention(torch.tensor(tables, dtype=torch.int32), tuple(new), tuple(lengths))
    out = KERNELS.prefill_attention(q, cache, KERNELS.plan_prefill(inputs, HEADS, cache), 0.3)
    rows = zip(torch.split(q, new), tables, lengths, strict=True)
    close(out, torch.cat([plain_attention(part, cache, pages, length, 0.3) for part, pages, length in rows]))


@pytest.mark.parametrize("kernels", [KERNELS, invariant_kernels()], ids=["plain", "deterministic"])
def test_rows_with_different_numbers_of_tokens_have_an_output_for_every_query(kernels: Kernels) -> None:
    """Also where there are more tokens than rows * query_len."""
    cache, queries = filled_cache(torch.float32), rand(30, HEADS, DIM, seed=2)
    starts, counts, lengths, pages = [2, 25], [3, 4], [9, 4], [[3, 1, 4], [7, 2, 5]]
    inputs = DecodeAttention(
        torch.tensor(pages, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        4,
        12,
        skip_empty=True,
        starts_B=torch.tensor(starts, dtype=torch.int32),
        queries_B=torch.tensor(counts, dtype=torch.int32),
    )
    out = kernels.decode_attention(queries, cache, inputs, 0.3)
    assert out.shape == queries.shape
    for start, count, length, own in zip(starts, counts, lengths, pages, strict=True):
        here = slice(start, start + count)
        close(out[here], plain_attention(queries[here], cache, own, length, 0.3))
