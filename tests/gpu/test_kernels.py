"""Every kernel of models/ops/nvidia.py against float64 formulas: random shapes, dtypes, poisoned outputs, graphs.

Run: python3 -m pytest -m gpu tests/gpu/test_kernels.py
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import DecodeAttention
from parallel.layers.weight import Weight
from tests.gpu.untyped import Stream

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from models.kernels.attention.decode_list import attend_list
    from models.kernels.attention.decode_work import SplitRule, plan_decode
    from models.kernels.interface import Rotation
    from models.kernels.matmul import candidates as product_candidates
    from models.kernels.matmul import choice_table, skinny
    from tests.models.kernels.nvidia_kernels import Nvidia, nvidia_kernels

DEVICE = "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HALF = [torch.bfloat16, torch.float16]
ALL = [*HALF, torch.float32]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Nvidia]:
    held = nvidia_kernels(DEVICE)
    # Workspaces hold garbage in real life; no kernel may read what it has not written.
    held.matmul._partial.fill_(math.nan)
    held.attention_sums.fill_(math.nan)
    yield held
    assert not held.matmul._counters.any(), "a split-K launch left its counters set"
    assert not held.attention_counters.any(), "a split attention launch left its counters set"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison = torch.full((64 << 20,), math.nan, device=DEVICE)  # freed at once: torch.empty finds NaN, not zeros
    del poison


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def check(out: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < times * TOLERANCE[dtype], f"relative error {error:.2e} of {tuple(out.shape)} {dtype}"


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


# -- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (3, 1024), (256, 4096), (17, 96), (2, 25600), (5, 5120)])
def test_norms(kernels: Nvidia, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual, weight = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    check(kernels.rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6), dtype)
    total = x + residual
    out, new_residual = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(new_residual, total)
    check(out, normed(total, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (256, 12288), (7, 40)])
def test_silu_mul(kernels: Nvidia, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype)
    check(kernels.silu_mul(gate_up), swiglu(gate_up), dtype)
    check(kernels.silu_mul(gate_up, gelu=True), geglu(gate_up), dtype)


# -- products -----------------------------------------------------------------------------------------------------

SHAPES = [(6144, 4096), (4096, 12288), (1024, 2048), (192, 96 * 4), (128, 1024), (4096, 3072)]


def scaled(rows: int, inner: int, dtype: torch.dtype) -> Tensor:
    scale: float = inner**-0.5
    return (torch.randn(rows, inner, device=DEVICE) * scale).to(dtype)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
def test_linear(kernels: Nvidia, dtype: torch.dtype, bias: bool, outputs: int, inner: int) -> None:
    weight, offset = scaled(outputs, inner, dtype), randn(outputs, dtype=dtype) if bias else None
    for rows in (1, 2, 3, 4, 5, 8, 13, 16, 33, 64, 100, 256):
        x = randn(rows, inner, dtype=dtype)
        expected = x.double() @ weight.double().t() + (offset.double() if offset is not None else 0)
        check(kernels.linear(x, Weight.of(weight, offset)), expected, dtype)


@pytest.mark.parametrize("rows", [2048, 2049, 4608, 8192])
def test_an_mlp_of_many_rows_goes_in_slices(kernels: Nvidia, rows: int) -> None:
    width, inner = 1024, 6144
    gate_up, down = scaled(2 * inner, width, torch.bfloat16), scaled(width, inner, torch.bfloat16)
    x, residual, weight = (randn(n, width, dtype=torch.bfloat16) for n in (rows, rows, 1))
    total = x + residual
    normed_x, new_residual = kernels.add_rms_norm(x, residual, weight.view(-1), 1e-6)
    assert torch.equal(new_residual, total)
    check(normed_x, normed(total, weight.view(-1), 1e-6), torch.bfloat16)
    expected = swiglu(normed_x.double() @ gate_up.double().t()) @ down.double().t()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = kernels.gate_up_down(normed_x, Weight.of(gate_up), Weight.of(down))
    if rows > 2048:
        assert torch.cuda.max_memory_allocated() - before <= 3 * 2048 * inner * 2, "activations of all rows at once"
    check(out, expected, torch.bfloat16, times=1.5)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("outputs", "inner"), [(6144, 4096), (4096, 1024), (256, 384), (512, 5120)])
def test_norm_folded_into_products(kernels: Nvidia, dtype: torch.dtype, add: bool, outputs: int, inner: int) -> None:
    weight, norm, offset = scaled(outputs, inner, dtype), randn(inner, dtype=dtype), randn(outputs, dtype=dtype)
    for rows in (1, 2, 3, 4, 8, 32, 130):
        x, residual = randn(rows, inner, dtype=dtype), randn(rows, inner, dtype=dtype)
        total = x + residual if add else x.clone()
        expected = normed(total, norm, 1e-5) @ weight.double().t()
        runs: list[tuple[Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]], Tensor]] = [
            (lambda a, r: kernels.add_norm_linear(a, r, norm, 1e-5, Weight.of(weight)), expected),
            (
                lambda a, r: kernels.add_norm_linear(a, r, norm, 1e-5, Weight.of(weight, offset)),
                expected + offset.double(),
            ),
            (lambda a, r: kernels.add_norm_gate_up(a, r, norm, 1e-5, Weight.of(weight)), swiglu(expected)),
            (
                lambda a, r: kernels.add_norm_gate_up(a, r, norm, 1e-5, replace(Weight.of(weight), gelu=True)),
                geglu(expected),
            ),
        ]
        for run, wanted in runs:
            out, new_residual = run(x.clone(), residual.clone() if add else None)
            assert torch.equal(new_residual, total)
            check(out, wanted, dtype, times=1.5)


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_every_gemv_candidate(kernels: Nvidia, rows: int, gate_up: bool) -> None:
    dtype, outputs, inner = torch.bfloat16, 512, 4096
    x, weight = randn(rows, inner, dtype=dtype), scaled(outputs, inner, dtype)
    expected = x.double() @ weight.double().t()
    shape = choice_table.LinearShape(rows, outputs, inner, dtype, gate_up=gate_up).bucket
    candidates = product_candidates.gemv_candidates(shape)
    assert candidates
    for choice in candidates:
        out = kernels.matmul.run(x, Weight.of(weight), choice, gate_up=gate_up)
        check(out, swiglu(expected) if gate_up else expected, dtype)


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("rows", [2, 8, 11, 32, 64, 200])
def test_every_skinny_candidate(kernels: Nvidia, rows: int, gate_up: bool) -> None:
    dtype, outputs, inner = torch.bfloat16, 1024, 3072
    x, residual, norm = randn(rows, inner, dtype=dtype), randn(rows, inner, dtype=dtype), randn(inner, dtype=dtype)
    weight = scaled(outputs, inner, dtype)
    total = x + residual
    expected = normed(total, norm, 1e-6) @ weight.double().t()
    shape = choice_table.LinearShape(rows, outputs, inner, dtype, normed=True, gate_up=gate_up).bucket
    candidates = [c for c in kernels.matmul.candidates(shape) if isinstance(c, choice_table.Skinny)]
    assert any(c.split > 1 for c in candidates)
    assert any(c.fold for c in candidates) == (rows <= 32)

    def run(choice: choice_table.Skinny) -> tuple[Tensor, Tensor]:
        return kernels.matmul.run_normed(x, residual.clone(), norm, 1e-6, Weight.of(weight), choice, gate_up=gate_up)

    for choice in candidates:
        first, new_residual = run(choice)
        check(first, swiglu(expected) if gate_up else expected, dtype)
        assert torch.equal(new_residual, total)
        for _ in range(5):  # the same bits whichever program comes last
            assert torch.equal(first, run(choice)[0])


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("rows", [8, 11, 32, 64, 128, 200, 256])
def test_every_wide_candidate(kernels: Nvidia, rows: int, gate_up: bool) -> None:
    """Tiles of a power of two and of one and a half of it, K whole and split, the last rows missing."""
    dtype = torch.bfloat16
    seen = set()
    shapes = [(6144, 1024), (4096, 4096), (3072, 1536)]
    shapes += [(6144, 4096)] * (rows <= 32)  # there tiles of one and a half of a power of two are larger
    for outputs, inner in shapes:
        x, weight = randn(rows, inner, dtype=dtype), scaled(outputs, inner, dtype)
        offset = None if gate_up else randn(outputs, dtype=dtype)
        expected = x.double() @ weight.double().t() + (0.0 if offset is None else offset.double())
        shape = choice_table.LinearShape(rows, outputs, inner, dtype, gate_up=gate_up).bucket
        for choice in kernels.matmul.candidates(shape):
            if isinstance(choice, choice_table.Wide):
                seen.add((choice.block_o & (choice.block_o - 1) == 0, choice.split > 1))
                first = kernels.matmul.run(x, Weight.of(weight, offset), choice, gate_up=gate_up)
                check(first, swiglu(expected) if gate_up else expected, dtype)
                for _ in range(3):  # the same bits whichever program comes last
                    assert torch.equal(first, kernels.matmul.run(x, Weight.of(weight, offset), choice, gate_up=gate_up))
    # At 256 these shapes are small, and all split K; where weights are the tall operand there is no tile of 48.
    whole = set() if rows > 128 else {(True, False), (False, False)} if rows >= 64 else {(True, False)}
    assert seen == {(True, True), (False, True)} | whole


@pytest.mark.parametrize("rows", [16, 128, 256])
def test_every_cublaslt_algorithm(kernels: Nvidia, rows: int) -> None:
    dtype, outputs, inner = torch.bfloat16, 1024, 3072
    x, weight = randn(rows, inner, dtype=dtype), scaled(outputs, inner, dtype)
    choices = kernels.matmul.candidates(choice_table.LinearShape(rows, outputs, inner, dtype))
    choices = [c for c in choices if isinstance(c, choice_table.CublasLt)]
    assert choices
    for choice in choices:
        check(kernels.matmul.run(x, Weight.of(weight), choice, gate_up=False), x.double() @ weight.double().t(), dtype)


@pytest.mark.parametrize(("measured", "rows"), [(64, 40), (64, 33), (256, 192), (256, 160), (384, 320)])
def test_cublaslt_algorithms_run_fewer_rows_where_the_library_says_so(
    kernels: Nvidia, measured: int, rows: int
) -> None:
    """A bucket that was not measured takes the algorithm of the next larger one."""
    dtype, outputs, inner = torch.bfloat16, 6144, 4096
    x, weight = randn(rows, inner, dtype=dtype), scaled(outputs, inner, dtype)
    lt = kernels.matmul._lt
    assert lt is not None
    found = kernels.matmul.candidates(choice_table.LinearShape(measured, outputs, inner, dtype))
    names = [choice.algorithm for choice in found if isinstance(choice, choice_table.CublasLt)]
    accepted = [name for name in names if lt.can_run(rows, outputs, inner, dtype, name)]
    assert accepted, f"of {len(names)} algorithms for {measured} rows none runs {rows}"
    assert all(lt.can_run(measured, outputs, inner, dtype, name) for name in names)
    for name in accepted:
        choice = choice_table.CublasLt(name, lt.version)
        check(kernels.matmul.run(x, Weight.of(weight), choice, gate_up=False), x.double() @ weight.double().t(), dtype)


def test_a_chain_of_dependent_launches_in_a_graph_sees_fresh_inputs(kernels: Nvidia) -> None:
    """Programmatic dependent launch overlaps kernels: each must still wait for what it reads."""
    dtype, width = torch.bfloat16, 1024
    for rows in (1, 4, 8, 32):
        layers = [
            (scaled(2 * width, width, dtype), scaled(width, width, dtype), 1 + 0.1 * randn(width, dtype=dtype))
            for _ in range(12)
        ]
        x = randn(rows, width, dtype=dtype)

        def chain(x: Tensor = x, layers: Any = layers) -> Tensor:
            hidden, residual = x, None
            for gate_up, down, norm in layers:
                hidden, residual = kernels.add_norm_gate_up(hidden, residual, norm, 1e-6, Weight.of(gate_up))
                hidden = kernels.linear(hidden, Weight.of(down))
            assert residual is not None
            return kernels.add_rms_norm(hidden, residual, layers[0][2], 1e-6)[0]

        replay, out = captured(chain)
        for _ in range(5):
            x.copy_(randn(rows, width, dtype=dtype))
            hidden, residual = x.double(), torch.zeros((), device=DEVICE)
            for gate_up, down, norm in layers:
                residual = hidden + residual
                hidden = swiglu(normed(residual, norm, 1e-6) @ gate_up.double().t()) @ down.double().t()
            out.fill_(math.nan)
            replay()
            check(out, normed(hidden + residual, layers[0][2], 1e-6), dtype, times=2)


def captured(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    side = Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


# -- rotation and attention ---------------------------------------------------------------------------------------


def rotated(x: Tensor, angles: Tensor, rotary: int) -> Tensor:
    cos, sin = angles.double()[:, None, : rotary // 2], angles.double()[:, None, rotary // 2 :]
    first, second = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., rotary:]), -1)


class Case:
    """A paged cache with random content, shuffled pages, NaN wherever no row may look, and a rotary table."""

    def __init__(
        self,
        rows: int,
        heads: int,
        kv_heads: int,
        dim: int,
        page: int,
        most: int,
        dtype: torch.dtype,
        query_len: int = 1,
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.page, self.dtype = heads, kv_heads, dim, page, dtype
        self.rows, self.query_len, self.most = rows, query_len, most
        width = -(-most // page)
        order = torch.randperm(rows * width, device=DEVICE) + 1
        self.table = order.to(torch.int32).view(rows, width)
        self.kv = randn(2, rows * width + 1, page, kv_heads, dim, dtype=dtype)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.cos_sin = randn(most, dim)
        self.set_lengths([random.Random(rows).randint(query_len, most) for _ in range(rows)])

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))

    @property
    def inputs(self) -> DecodeAttention:
        return DecodeAttention(self.table, self.lengths, self.query_len, self.most)

    @property
    def last_positions(self) -> Tensor:
        return (self.lengths - 1).long()

    @property
    def last_slots(self) -> Tensor:
        position = self.last_positions
        pages = self.table.gather(1, (position // self.page)[:, None])[:, 0].long()
        return pages * self.page + position % self.page

    def poison_beyond(self) -> None:
        """NaN in every place past a row's length and in the pages of nobody."""
        flat = self.kv.flatten(1, 2)
        used = torch.zeros(flat.shape[1], dtype=torch.bool, device=DEVICE)
        for row, length in enumerate(self.lengths.tolist()):
            position = torch.arange(length, device=DEVICE)
            used[self.table[row, position // self.page].long() * self.page + position % self.page] = True
        flat[:, ~used] = math.nan

    def attention(self, q: Tensor, scale: float, kv: Tensor | None = None) -> Tensor:
        keys, values = (self.kv if kv is None else kv).flatten(1, 2)
        group, new = self.heads // self.kv_heads, self.query_len
        out = torch.zeros(self.rows, new, self.heads, self.dim, dtype=torch.float64, device=DEVICE)
        for row, length in enumerate(self.lengths.tolist()):
            position = torch.arange(length, device=DEVICE)
            slots = self.table[row, position // self.page].long() * self.page + position % self.page
            k = keys[slots].double().repeat_interleave(group, 1)
            v = values[slots].double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,lhd->hql", q.view(self.rows, new, self.heads, self.dim)[row].double(), k) * scale
            visible = position[None] <= torch.arange(length - new, length, device=DEVICE)[:, None]
            weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
            out[row] = torch.einsum("hql,lhd->qhd", weights, v)
        return out.view(-1, self.heads, self.dim)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotary", "norm"),
    [(1, 32, 8, 128, 128, True), (5, 16, 8, 128, 128, True), (300, 32, 8, 128, 64, False), (9, 6, 2, 24, 8, True),
     (300, 8, 4, 256, 256, True), (3, 8, 2, 512, 512, True), (300, 8, 2, 512, 512, True),
     (40, 14, 2, 64, 64, False), (2, 3, 1, 80, 80, False)],
)  # fmt: skip
def test_rope_and_cache(
    kernels: Nvidia,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    norm: bool,
) -> None:
    page = 16
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q_norm, k_norm = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if norm else (None, None)
    table = randn(500, rotary)
    positions = torch.randint(0, 500, (tokens,), device=DEVICE)
    kv = randn(2, tokens // page + 3, page, kv_heads, dim, dtype=dtype)
    slots = torch.randperm(kv.shape[1] * page, device=DEVICE)[:tokens]
    before = kv.clone()
    q = kernels.rope_and_cache(qkv, heads, kv, Rotation(q_norm, k_norm, 1e-6, table, positions, slots))
    q0, k0, v0 = torch.split(qkv.view(tokens, -1, dim), [heads, kv_heads, kv_heads], 1)
    q1 = q0.double() if q_norm is None else normed(q0, q_norm, 1e-6)
    k1 = k0.double() if k_norm is None else normed(k0, k_norm, 1e-6)
    check(q, rotated(q1, table[positions], rotary), dtype)
    flat, flat_before = kv.flatten(1, 2), before.flatten(1, 2)
    check(flat[0, slots], rotated(k1, table[positions], rotary), dtype)
    assert torch.equal(flat[1, slots], v0)
    untouched = torch.ones(flat.shape[1], dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert torch.equal(flat[:, untouched], flat_before[:, untouched])
    if norm:  # values are normed, or keys, in their place
        turn = Rotation(q_norm, k_norm, 1e-6, table, positions, slots, value_norm=True)
        kernels.rope_and_cache(qkv, heads, kv, turn)
        ones = torch.ones(dim, dtype=dtype, device=DEVICE)
        check(flat[1, slots], normed(v0, ones, 1e-6), dtype)
        packed = qkv[:, : (heads + kv_heads) * dim].contiguous()
        kernels.rope_and_cache(packed, heads, kv, replace(turn, values_are_keys=True))
        check(flat[1, slots], normed(k0, ones, 1e-6), dtype)
        check(flat[0, slots], rotated(k1, table[positions], rotary), dtype)


ATTENTION = [
    # rows, heads, kv_heads, dim, page, longest, query_len
    (1, 32, 8, 128, 64, 640, 1),
    (1, 32, 8, 128, 64, 8000, 1),
    (3, 16, 8, 128, 16, 700, 1),
    (8, 32, 8, 128, 64, 1024, 1),
    (33, 32, 8, 128, 64, 700, 1),
    (64, 16, 8, 128, 128, 300, 1),
    (5, 14, 2, 64, 32, 500, 1),
    (4, 6, 2, 24, 8, 100, 1),
    (2, 8, 1, 256, 64, 300, 1),
    (4, 32, 8, 128, 64, 600, 4),
    (3, 16, 8, 128, 32, 400, 16),
    (2, 4, 4, 80, 16, 90, 3),
    (1, 32, 8, 128, 64, 640, 4),
    (128, 32, 8, 128, 64, 700, 1),  # and more: by TMA, where the dtype is a 16-bit one
    (257, 16, 4, 64, 32, 200, 1),
    (130, 16, 8, 128, 128, 300, 1),
    (512, 32, 2, 128, 64, 130, 1),
    (128, 32, 8, 128, 64, 300, 4),
    (2, 16, 2, 256, 64, 300, 8),  # 64 query rows of the widest head: blocks shrink to fit
]


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_decode_attention(kernels: Nvidia, dtype: torch.dtype, case: tuple[int, ...]) -> None:
    rows, heads, kv_heads, dim, page, most, query_len = case
    made = Case(rows, heads, kv_heads, dim, page, most, dtype, query_len)
    q = randn(rows * query_len, heads, dim, dtype=dtype)
    expected = made.attention(q, dim**-0.5)
    check(kernels.decode_attention(q, made.kv, made.inputs, dim**-0.5), expected, dtype)
    made.poison_beyond()
    check(kernels.decode_attention(q, made.kv, made.inputs, dim**-0.5), expected, dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", [c for c in ATTENTION if c[-1] == 1], ids=str)
def test_decode_attention_follows_lengths_changed_between_replays(
    kernels: Nvidia, dtype: torch.dtype, case: tuple[int, ...]
) -> None:
    rows, heads, kv_heads, dim, page, most, _ = case
    made = Case(rows, heads, kv_heads, dim, page, most, dtype)
    q = randn(rows, heads, dim, dtype=dtype)
    replay, out = captured(lambda: kernels.decode_attention(q, made.kv, made.inputs, 0.1))
    for seed in range(6):
        pick = random.Random(seed)
        made.set_lengths([pick.choice([1, page, page + 1, most, pick.randint(1, most)]) for _ in range(rows)])
        out.fill_(math.nan)
        replay()
        check(out, made.attention(q, 0.1), dtype)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("case", [c for c in ATTENTION if c[-1] == 1], ids=str)
def test_rotation_and_cache_write_folded_into_attention(
    kernels: Nvidia, dtype: torch.dtype, case: tuple[int, ...]
) -> None:
    rows, heads, kv_heads, dim, page, most, _ = case
    made = Case(rows, heads, kv_heads, dim, page, most, dtype)
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = randn(dim, dtype=dtype), randn(dim, dtype=dtype)
    kv = made.kv.clone()
    positions, slots = made.last_positions, made.last_slots
    turn = Rotation(*norms, 1e-6, made.cos_sin, positions, slots)
    q = kernels.rope_and_cache(qkv, heads, kv, turn)
    expected = made.attention(q, dim**-0.5, kv)

    def run() -> Tensor:
        return kernels.rope_cache_attend(qkv, heads, made.kv, turn, made.inputs, dim**-0.5)

    check(run(), expected, dtype, times=2)
    check(made.kv, kv, dtype)
    replay, out = captured(run)
    for seed in range(3):
        pick = random.Random(seed)
        made.set_lengths([pick.choice([1, page, page + 1, most, pick.randint(1, most)]) for _ in range(rows)])
        positions.copy_(made.last_positions)
        slots.copy_(made.last_slots)
        slots[0] = seed % page  # a masked row writes to the trash page and reads what was there
        qkv.copy_(randn(*qkv.shape, dtype=dtype))
        kv.copy_(made.kv)
        q = kernels.rope_and_cache(qkv, heads, kv, turn)
        expected = made.attention(q, dim**-0.5, kv)
        out.fill_(math.nan)
        replay()
        check(out, expected, dtype, times=2)
        check(made.kv, kv, dtype)


@pytest.mark.parametrize("warps", [1, 2])
def test_many_rows_give_the_same_bits_every_time(kernels: Nvidia, warps: int) -> None:
    """The newest key is written and read by the same program, TMA brings the others: a race would show in the bits."""
    rows, heads, kv_heads, dim, most, dtype = 384, 16, 8, 128, 700, torch.bfloat16
    made = Case(rows, heads, kv_heads, dim, 64, most, dtype)
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = randn(dim, dtype=dtype), randn(dim, dtype=dtype)
    turn = Rotation(*norms, 1e-6, made.cos_sin, made.last_positions, made.last_slots)
    stale = made.kv.clone()
    work = plan_decode(made.inputs, SplitRule(32, 1, 1024, 1), pdl=False)
    memory = kernels.attention_sums, kernels.attention_counters
    how: dict[str, Any] = {"tma": True, "block_n": 32, "stages": 3, "programs": rows * kv_heads, "pdl": kernels.pdl}

    def launch(qkv: Tensor, heads: int, kv: Tensor, rotation: Rotation | None = None) -> Tensor:
        torch.cuda.synchronize()  # attention may read the list before its predecessor ends
        return attend_list(qkv, heads, kv, made.inputs, work, dim**-0.5, *memory, rotation=rotation, warps=warps, **how)

    found = []
    for _ in range(50):
        made.kv.copy_(stale)  # with what was there before the newest keys
        found.append(launch(qkv, heads, made.kv, turn))
    assert all(torch.equal(one, found[0]) for one in found)
    q = kernels.rope_and_cache(qkv, heads, stale, turn)
    alone = launch(q, heads, stale)
    off = (alone - found[0]).float().norm() / alone.float().norm()
    assert off < 2e-3, "q rounds elsewhere now and then; a key of the step before would be off by far more"
    assert not torch.equal(launch(q, heads, made.kv * 1.01), alone)


def test_a_row_without_tokens_gives_a_finite_result(kernels: Nvidia) -> None:
    made = Case(3, 8, 2, 128, 64, 300, torch.bfloat16)
    made.set_lengths([0, 5, 0])
    q = randn(3, 8, 128, dtype=torch.bfloat16)
    out = kernels.decode_attention(q, made.kv, made.inputs, 0.1)
    assert torch.isfinite(out).all()


def test_tuned_choices_agree_with_cublas_and_survive_the_disk(kernels: Nvidia, tmp_path: Any) -> None:
    dtype = torch.bfloat16
    shapes = [
        choice_table.LinearShape(rows, 1536, 1024, dtype, normed, gate_up)
        for rows in (1, 16)
        for normed, gate_up in ((False, False), (True, False), (True, True))
    ]
    fresh = nvidia_kernels(DEVICE)
    fresh.matmul.choices = choice_table.ChoiceTable()
    fresh.matmul.tune(shapes, tmp_path)
    held = choice_table.load(choice_table.cache_file(tmp_path, torch.device(DEVICE)))
    assert held == fresh.matmul.choices
    for shape in shapes:
        x, weight = randn(shape.rows, shape.inner, dtype=dtype), scaled(shape.outputs, shape.inner, dtype)
        expected = x.double() @ weight.double().t()
        out = fresh.matmul.run(x, Weight.of(weight), fresh.matmul.choice(shape), gate_up=shape.gate_up)
        check(out, swiglu(expected) if shape.gate_up else expected, dtype)


def test_workspace_arithmetic() -> None:
    assert skinny.workspace_floats(8, 4096, 8, 64, split=4) == 4 * (4096 + 64) * 8
    assert skinny.workspace_floats(8, 4096, 8, 64, split=1) == 0
