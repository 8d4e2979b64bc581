"""The kernels of a decode step through Triton's interpreter, on a CPU: ``TRITON_INTERPRET=1 python -m ...``.

Each against the torch reference in float32 or float16, then a whole engine over them against an engine over the
reference, token for token. Exits with an error where one differs.

Knows: the kernels' choices, and shapes that reach every branch of its kernels. Does not know: GPUs (tests/gpu), where
the same kernels run compiled, in bfloat16 and with programmatic dependent launch.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from models.inputs import DecodeAttention
from models.kernels import bandwidth_probe
from models.kernels.attention import decode, rope_decode, rope_prefill
from models.kernels.attention.decode_work import ANY_LENGTH, SplitRule
from models.kernels.experts import grouped, streamed
from models.kernels.interface import Rotation
from models.kernels.matmul import candidates, codes
from models.kernels.matmul import norm as norm_kernels
from models.kernels.matmul import skinny as skinny_kernel
from models.kernels.matmul.choice_table import Choice, ChoiceTable, Gemv, LinearShape, Skinny, Wide
from models.kernels.traits import H200
from models.ops.rows_reference.dense import simulated
from models.ops.tuned import TunedProducts
from parallel.comm.quantised import SEPARATE, Quantised
from parallel.layers.weight import Weight, fp8
from tests.models.kernels import quick_interpreter  # noqa: F401  it need only be there
from tests.models.kernels.nvidia_kernels import Nvidia, check_counters, nvidia_kernels_on_cpu
from tests.plant import reference_kernels
from tests.runtime.engine.rig import request, rig, run

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter's dot does not know bfloat16
REFERENCE = reference_kernels()


TRAITS = dataclasses.replace(H200, capability=(8, 0))  # an H200 without TMA and dependent launches


class InterpretedMatmul(TunedProducts):
    """Without cuBLASLt. Workspaces begin as NaN."""

    def __init__(self) -> None:
        self.device, self.traits, self.pdl = torch.device("cpu"), TRAITS, False
        self.choices = ChoiceTable()
        self._resolved, self._runs, self._slower = {}, {}, {}
        self._lt = cast(Any, SimpleNamespace(version=0, algorithms=lambda *shape, most: []))
        self._partial = torch.full((1 << 20,), math.nan)
        self._counters = torch.zeros(skinny_kernel.COUNTERS, dtype=torch.int32)


def interpreted_kernels() -> Nvidia:
    """Without cuBLASLt and dependent launches."""
    return nvidia_kernels_on_cpu(InterpretedMatmul(), traits=TRAITS)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype, what: object) -> None:
    error = float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-30))
    assert error < TOLERANCE[dtype], f"{what}: relative error {error:.1e}"


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


# -- rows and products ---------------------------------------------------------------------------------------------


def rows(kernels: Nvidia) -> None:
    for dtype in TOLERANCE:
        for tokens, width in ((1, 256), (3, 96), (2, 5120)):
            x, residual, weight = (randn(n, width, dtype=dtype) for n in (tokens, tokens, 1))
            check(kernels.rms_norm(x, weight[0], 1e-6), REFERENCE.rms_norm(x, weight[0], 1e-6), dtype, "norm")
            expected, total = REFERENCE.add_rms_norm(x, residual, weight[0], 1e-6)
            out, kept = kernels.add_rms_norm(x, residual.clone(), weight[0], 1e-6)
            check(out, expected, dtype, ("add and norm", width))
            check(kept, total, dtype, ("residual", width))
            for gelu in (False, True):
                found = norm_kernels.silu_mul(x, False, gelu=gelu)
                check(found, REFERENCE.silu_mul(x, gelu=gelu), dtype, ("gated", width, gelu))
        table, ids = Weight.of(randn(24, 2500, dtype=dtype)), torch.tensor([16, 15, 39, 40, 0, 2**31 - 1, 20])
        for first, held in ((16, 24), (0, 16), (40, 0)):
            found = kernels.vocab_rows(table, ids, first, held)
            assert torch.equal(found, REFERENCE.vocab_rows(table, ids, first, held)), ("vocab rows", first, dtype)


def rows_as_codes(kernels: Nvidia) -> None:
    """What makes activations quantises them. The interpreter rounds some codes otherwise than GPUs do."""

    def check_codes(found: Quantised, numbers: Tensor, what: object) -> None:
        scale = found.scale[:, : found.tokens].t().unsqueeze(-1)
        meant = found.codes[: found.tokens].float().view(found.tokens, -1, found.group) * scale
        expected = simulated(numbers, found.group).view(found.tokens, -1, found.group)
        most = numbers.float().view(found.tokens, -1, found.group).abs().amax(-1, keepdim=True)
        torch.testing.assert_close(scale, most.clamp(min=1e-10) / 448, msg=lambda text: f"{what}: {text}")
        wrong = (meant - expected).abs() > 1e-3 * most
        assert float(wrong.float().mean()) < 0.1, what

    for tokens, width, group in ((3, 256, 128), (2, 96, 96), (5, 192, 32)):
        x, residual, norm, gate_up = (
            randn(n, many, dtype=torch.float16)
            for n, many in ((tokens, width), (tokens, width), (1, width), (tokens, 2 * width))
        )
        for numbers in (False, True):
            into = Quantised.empty(tokens, width, group, x.dtype, "cpu", numbers=numbers)
            expected, total = kernels.add_rms_norm(x, residual.clone(), norm[0], 1e-6)
            kept = residual.clone()
            norm_kernels.rms_norm(x, kept, norm[0], 1e-6, False, into)
            check_codes(into, expected, ("norm", width, group))
            assert torch.equal(kept, total)
            assert into.numbers is None or torch.equal(into.numbers, expected)
        into = Quantised.empty(tokens, width, group, x.dtype, "cpu")
        kernels.silu_mul(gate_up, into=into)
        check_codes(into, kernels.silu_mul(gate_up), ("SiLU-mul", width, group))
        kernels.sigmoid_mul(x, residual, into=into)
        check_codes(into, kernels.sigmoid_mul(x, residual), ("gate", width, group))
        before = SEPARATE.count
        codes.quantise(x, group, False, into)
        assert SEPARATE.count == before + 1, "no other kernel above makes codes in a launch of its own"
        check_codes(into, x, ("alone", width, group))
        codes.quantise(x, group, False, into, cap=0.5)
        check_codes(into, x.clamp(-0.5, 0.5), ("cut", width, group))


def some(shape: LinearShape) -> list[Choice]:
    """The likeliest candidate, another one, and split ones and wide ones, as small weights never have them."""
    found = candidates.candidates_for(shape)
    ragged = [Gemv(2, 1024, 4)] if shape.rows <= candidates.MOST_GEMV_ROWS else []
    picked = [*found[:1], *ragged, *random.Random(shape.rows).sample(found[1:], len(found[1:2]))]
    skinny = next((choice for choice in found if isinstance(choice, Skinny)), None)
    if skinny is not None:
        picked += [
            dataclasses.replace(skinny, block_k=128, prefetch=128, split=split, fold=split == 2) for split in (2, 3)
        ]
        picked += [Wide(16, 48, 128, 3, 3, 4, 64), Wide(64, 32, 64, 1, 3, 4, 128)]  # tall: the weights, and the tokens
    return picked


def products(kernels: Nvidia) -> None:
    """Every kind of candidate, alone, behind a norm, in front of SiLU-mul, and with a bias."""
    outputs, inner = 96, 768
    kinds = set()
    for count, dtype in ((1, torch.float32), (3, torch.float16), (13, torch.float16)):
        x, residual, norm = (randn(n, inner, dtype=dtype) for n in (count, count, 1))
        weight, bias = randn(outputs, inner, dtype=dtype) * inner**-0.5, randn(outputs, dtype=dtype)
        for gate_up in (False, True):
            shape = LinearShape(count, outputs, inner, dtype, normed=True, gate_up=gate_up).bucket
            hidden, total = REFERENCE.add_rms_norm(x, residual, norm[0], 1e-6)
            offset = None if gate_up else bias  # no gate-up has a bias
            gelu = gate_up and count == 3
            biased, bare = (dataclasses.replace(Weight.of(weight, one), gelu=gelu) for one in (offset, None))
            plain = REFERENCE.linear(x, biased)
            after = REFERENCE.linear(hidden, bare)
            if count <= candidates.MOST_GEMV_ROWS:
                check(kernels.router_logits(x, bare), REFERENCE.router_logits(x, bare), torch.float32, "router")
                for router, added in ((bare, residual), (biased, None)):
                    given = norm[0], 1e-6, router
                    wanted = REFERENCE.add_norm_logits(x, added, *given, wide=router is bare)
                    held = None if added is None else added.clone()
                    made = kernels.add_norm_logits(x, held, *given, wide=router is bare)
                    for one, other in zip(made, wanted, strict=True):
                        check(one, other, dtype, ("normed router", added is None))
                        assert one.dtype == other.dtype
            for choice in some(shape):
                kinds.add((type(choice), getattr(choice, "fold", False), getattr(choice, "split", 1) > 1))
                found = kernels.matmul.run(x, biased, choice, gate_up=gate_up)
                check(found, REFERENCE.silu_mul(plain, gelu=gelu) if gate_up else plain, dtype, (choice, gate_up))
                found, kept = kernels.matmul.run_normed(
                    x, residual.clone(), norm[0], 1e-6, bare, choice, gate_up=gate_up
                )
                gated = REFERENCE.silu_mul(after, gelu=gelu) if gate_up else after
                check(found, gated, dtype, ("norm", choice, gate_up))
                check(kept, total, dtype, ("residual", choice))
    assert {(Gemv, False, False), (Skinny, False, True), (Skinny, True, True), (Wide, False, True)} <= kinds, kinds
    check_counters(kernels)


# -- reading memory ------------------------------------------------------------------------------------------------


def codes_as_bytes(kernels: Nvidia) -> None:
    """As GPUs before sm_89 take FP8 weights: each code that is a number, then products and experts."""
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)[:, :127].contiguous()  # 127 and 255 are NaN
    for dtype in TOLERANCE:
        found = codes.decoded(Weight(every, fp8(1, 0), scale=torch.ones(2, 1)), dtype, False)
        assert torch.equal(found, every.view(torch.float8_e4m3fn).to(dtype)), dtype

    def both(*sizes: int) -> tuple[Weight, Weight]:
        held = torch.randn(sizes).to(torch.float8_e4m3fn)
        form = fp8(32, 128)
        scale = torch.rand(*sizes[:-2], *form.grid(*sizes[-2:])) / sizes[-1] ** 0.5
        return Weight(held.view(torch.uint8), form, scale=scale), Weight.of(
            Weight(held, form, scale=scale).plain(torch.float32)
        )

    for count, choice in ((1, Gemv(2, 256, 4)), (5, Skinny(16, 32, 64, 2, 2, 4, 0))):
        (stored, meant), x = both(32, 256), randn(count, 256, dtype=torch.float16)
        found = kernels.matmul.run(x, stored, choice, gate_up=False)
        check(found, REFERENCE.linear(x.float(), meant), torch.float16, choice)
    (up, meant_up), (down, meant_down) = both(4, 64, 128), both(4, 128, 32)
    x, chosen = randn(3, 128, dtype=torch.float32), torch.arange(6, dtype=torch.int32).view(3, 2) % 4
    weights = torch.rand(3, 2)
    expected = REFERENCE.expert_mlp(x, meant_up, meant_down, weights, chosen, all_experts=4)
    for run_experts in (streamed.expert_mlp, partial(grouped.expert_mlp, all_experts=4)):
        check(run_experts(x, up, down, weights, chosen, False), expected, torch.float32, "experts")


def reading(kernels: Nvidia) -> None:
    """Every block, its first and its last value; what lies behind the last block is not written."""
    block = bandwidth_probe.BLOCK
    values = torch.randint(-(2**31), 2**31 - 2, (3, block), dtype=torch.int32)
    for row, column in enumerate((0, block - 1, block // 2)):
        values[row, column] = 2**31 - 1 - row
    out = torch.full((4,), 7, dtype=torch.int32)
    bandwidth_probe.block_maxima(values.flatten(), out)
    assert out.tolist() == [*values.amax(1).tolist(), 7]


# -- rotation and attention ----------------------------------------------------------------------------------------


class Cache:
    """Shuffled pages; NaN wherever no row may look."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: int, page: int, dtype: torch.dtype) -> None:
        self.page, width = page, -(-max(lengths) // page)
        self.table = (torch.randperm(len(lengths) * width) + 1).to(torch.int32).view(len(lengths), width)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.kv = torch.full((2, self.table.numel() + 1, page, kv_heads, dim), math.nan, dtype=dtype)
        for row, length in enumerate(lengths):
            where = self.slots(row, torch.arange(length))
            self.kv.flatten(1, 2)[:, where] = randn(2, length, kv_heads, dim, dtype=dtype)

    def slots(self, row: int, positions: Tensor) -> Tensor:
        return self.table[row, positions // self.page].long() * self.page + positions % self.page

    def inputs(self, query_len: int) -> DecodeAttention:
        return DecodeAttention(self.table, self.lengths, query_len, self.table.shape[1] * self.page)


def attention(kernels: Nvidia) -> None:
    for heads, kv_heads, dim, page, query_len, dtype in (
        (4, 2, 16, 16, 1, torch.float32),
        (8, 2, 64, 16, 1, torch.float16),
        (6, 2, 24, 8, 1, torch.float16),
        (4, 2, 32, 16, 3, torch.float32),
        (4, 1, 64, 64, 5, torch.float16),
        (4, 2, 128, 32, 3, torch.float16),
        (3, 3, 64, 16, 1, torch.float16),
        (4, 2, 16, 48, 1, torch.float32),  # blocks of keys that straddle pages
    ):
        lengths = [query_len, 70, 1 + 16 * query_len]
        cache = Cache(lengths, kv_heads, dim, page, dtype)
        q = randn(len(lengths) * query_len, heads, dim, dtype=dtype)
        expected = REFERENCE.decode_attention(q, cache.kv, cache.inputs(query_len), dim**-0.5)
        what = ("attention", heads, dim, query_len)
        check(kernels.decode_attention(q, cache.kv, cache.inputs(query_len), dim**-0.5), expected, dtype, what)
        for block_n, splits in ((16, 1), (16, 4), (64, 2)):
            found = decode.decode_attention(
                q,
                heads,
                cache.kv,
                cache.inputs(query_len),
                SplitRule(block_n, splits, ANY_LENGTH, splits),
                dim**-0.5,
                kernels.attention_sums,
                kernels.attention_counters,
                stages=2,
                warps=4,
                pdl=False,
            )
            check(found, expected, dtype, (*what, block_n, splits))
    check_counters(kernels)


def blocks(kernels: Nvidia) -> None:
    """Blocks that see all of themselves, with and without a plan, by TMA and not; blocks that do not; the bits of a
    block that sees itself are those of one token with as many heads."""
    for heads, kv_heads, dim, page, block, dtype in (
        (4, 2, 16, 16, 4, torch.float32),
        (8, 2, 64, 16, 4, torch.float16),
        (3, 1, 24, 8, 5, torch.float16),
    ):
        cache = Cache([block, 70, 33], kv_heads, dim, page, dtype)
        q, inputs, scale = randn(3 * block, heads, dim, dtype=dtype), cache.inputs(block), dim**-0.5
        for causal in (True, False):
            asked = dataclasses.replace(inputs, causal=causal)
            expected = REFERENCE.decode_attention(q, cache.kv, asked, scale)
            for planned in (asked, kernels.plan_decode(asked, heads, cache.kv)):
                found = kernels.decode_attention(q, cache.kv, planned, scale)
                check(found, expected, dtype, ("block", heads, dim, block, causal))
        wide = q.view(3, block, kv_heads, -1, dim).transpose(1, 2).reshape(3, block * heads, dim)
        one = kernels.plan_decode(cache.inputs(1), block * heads, cache.kv)
        whole = kernels.decode_attention(wide, cache.kv, one, scale)
        assert torch.equal(found, whole.view(3, kv_heads, block, -1, dim).transpose(1, 2).reshape(q.shape))
    check_counters(kernels)


def rotation(kernels: Nvidia) -> None:
    """Alone and folded into attention: the same queries, keys, values and outputs, and nothing else written."""
    for heads, kv_heads, dim, rotary, norm, dtype in (
        (4, 2, 16, 16, True, torch.float32),
        (8, 2, 64, 64, True, torch.float16),
        (6, 3, 24, 8, False, torch.float16),
    ):
        lengths, page = [1, 40, 33], 16
        cache = Cache(lengths, kv_heads, dim, page, dtype)
        positions = torch.tensor(lengths) - 1
        slots = torch.cat([cache.slots(row, positions[row : row + 1]) for row in range(len(lengths))])
        qkv = randn(len(lengths), (heads + 2 * kv_heads) * dim, dtype=dtype)
        q_norm, k_norm = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if norm else (None, None)
        angles = torch.randn(64, rotary)
        turn = Rotation(q_norm, k_norm, 1e-6, angles, positions, slots)
        written, alone, folded = (cache.kv.clone() for _ in range(3))
        q = REFERENCE.rope_and_cache(qkv, heads, written, turn)
        check(kernels.rope_and_cache(qkv, heads, alone, turn), q, dtype, ("rotation", heads, dim))
        without = cache.kv.clone()
        kernels.rope_and_cache(qkv[:, heads * dim :].contiguous(), 0, without, turn)
        assert torch.equal(without.nan_to_num(), alone.nan_to_num()), "keys and values alone"
        columns = cache.kv.clone()
        kernels.rope_and_cache(qkv[:, heads * dim :], 0, columns, turn)
        assert torch.equal(columns.nan_to_num(), alone.nan_to_num()), "columns of a wider tensor"
        scale, inputs = dim**-0.5, cache.inputs(1)
        expected = REFERENCE.decode_attention(q, written, inputs, scale)
        check(
            kernels.rope_cache_attend(qkv, heads, folded, turn, inputs, scale), expected, dtype, ("folded", heads, dim)
        )
        for kv in (alone, folded):
            check(kv.nan_to_num(), written.nan_to_num(), dtype, ("cache", heads, dim))
            assert torch.equal(kv.isnan(), written.isnan()), "written where nobody asked"
        for keys_alone in (False, True):  # values are normed
            given = dataclasses.replace(turn, value_norm=True, values_are_keys=keys_alone)
            packed = qkv[:, : qkv.shape[1] - kv_heads * dim * keys_alone].contiguous()
            kinds: list[Callable[..., Tensor]] = [rope_decode.rope_and_cache]
            kinds += [rope_prefill.rope_and_cache] if rope_prefill.supports(dim, rotary) else []
            normed = cache.kv.clone()
            q = REFERENCE.rope_and_cache(packed, heads, normed, given)
            for kind in kinds:
                kv = cache.kv.clone()
                check(kind(packed, heads, kv, given, False), q, dtype, ("queries", heads, dim))
                check(kv.nan_to_num(), normed.nan_to_num(), dtype, ("normed values", heads, dim, keys_alone))


# -- a whole engine ------------------------------------------------------------------------------------------------

SHAPE: dict[str, object] = {
    "hidden_size": 512,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 64,
    "num_hidden_layers": 1,
}


def engine(kernels: Nvidia) -> None:
    """Admissions, ends and chained steps over interpreted kernels: token for token those of the reference."""
    requests = [
        request(i, range(3 + i, 9 + 3 * i), max_tokens=2 + i, temperature=0.9 * (i % 2), stops=()) for i in range(3)
    ]
    options: dict[str, Any] = {"shape": SHAPE, "rows": 2, "blocks": 24, "max_model_len": 64, "max_prefill_tokens": 16}
    with rig(**options) as reference:
        expected = run(reference, requests)
    with rig(kernels=kernels, **options) as interpreted:
        found = run(interpreted, requests)
        assert interpreted.counters["chained_steps"] > 0
    assert {i: one.token_ids for i, one in found.items()} == {i: one.token_ids for i, one in expected.items()}
    ran = {(type(kernels.matmul.choice(shape)), shape.normed) for shape in list(kernels.matmul._resolved)}
    assert {(Gemv, True), (Gemv, False)} <= ran, ran
    check_counters(kernels)


PARTS: tuple[Callable[[Nvidia], None], ...] = (
    rows,
    rows_as_codes,
    products,
    codes_as_bytes,
    reading,
    attention,
    blocks,
    rotation,
    engine,
)


def main() -> None:
    torch.set_num_threads(1)
    for part in PARTS:
        torch.manual_seed(0)
        began = time.perf_counter()
        part(interpreted_kernels())
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
