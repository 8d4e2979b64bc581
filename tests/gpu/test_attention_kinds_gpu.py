"""Windows, sinks and soft caps on a GPU, at the heads of gpt-oss, Gemma 3 27B and 1B, against the reference in float32.

Pages before every window are NaN: they may be another request's by then. And whole engines of these families.

Run: python3 -m pytest -m gpu tests/gpu/test_attention_kinds_gpu.py
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention
from models.kernels.interface import AttentionKind, Rotation
from models.ops.select import select_kernels
from parallel.layers.weight import Weight
from runtime.execute.device.cuda import CudaDevice
from runtime.execute.sampling.draft_tree import lay_out_in_torch
from tests.gpu.test_engine_gpu import SHAPE
from tests.gpu.test_kernels import DEVICE, Case, captured, check, randn
from tests.plant import reference_kernels
from tests.runtime.engine.rig import rig
from tests.runtime.engine.same_bits import CONDITIONS, answers, difference, plainly, questions
from tests.runtime.engine.test_attention_kinds import MODELS

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from tests.models.kernels.nvidia_kernels import (
        InvariantNvidia,
        Nvidia,
        check_counters,
        invariant_nvidia_kernels,
        nvidia_kernels,
    )

REFERENCE = reference_kernels()
BF16 = torch.bfloat16
# heads, kv heads, head dim, window, soft cap, whether there are sinks
SHAPES = {
    "gpt-oss": (64, 8, 64, 128, None, True),
    "gpt-oss full": (64, 8, 64, None, None, True),
    "gemma 3 27b": (32, 16, 128, 1024, None, False),
    "gemma 3 1b": (4, 1, 256, 512, None, False),
    "capped": (8, 4, 256, 4096, 50.0, False),
}
OF_512 = {"gemma 4, 512 dims": MODELS["gemma 4"] | {"global_head_dim": 512}}
EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(scope="module")
def kernels() -> Nvidia:
    made = nvidia_kernels(DEVICE, prefill="triton")
    made.attention_sums.fill_(math.nan)
    return made


@pytest.fixture(scope="module")
def exact() -> InvariantNvidia:
    return invariant_nvidia_kernels(DEVICE)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def kind_of(shape: tuple[Any, ...]) -> AttentionKind:
    heads, _, _, window, cap, sinks = shape
    return AttentionKind(window, cap, randn(heads) if sinks else None)


def case_of(shape: tuple[Any, ...], rows: int, most: int, new: int) -> Case:
    heads, kv_heads, dim, window, *_ = shape
    made = Case(rows, heads, kv_heads, dim, 64, most, BF16, new)
    made.poison_beyond()
    if window is not None:
        for row, length in enumerate(made.lengths.tolist()):
            made.kv[:, made.table[row, : max(0, length - window - new + 1) // 64].long()] = math.nan
    return made


def expected(q: Tensor, made: Case, inputs: DecodeAttention, kind: AttentionKind) -> Tensor:
    wide = dataclasses.replace(inputs, work=None)
    return REFERENCE.decode_attention(q.float(), made.kv.float(), wide, made.dim**-0.5, kind=kind)


@EACH
@pytest.mark.parametrize(("rows", "new"), [(1, 1), (8, 1), (32, 1), (256, 1), (8, 8), (32, 5)])
def test_decode(kernels: Nvidia, exact: InvariantNvidia, shape: tuple[Any, ...], rows: int, new: int) -> None:
    """Planned and captured, as a step has it, at other lengths than it was captured with; and the deterministic one."""
    kind, made = kind_of(shape), case_of(shape, rows, 5000 if rows < 256 else 1500, new)
    q, scale = randn(rows * new, made.heads, made.dim, dtype=BF16), made.dim**-0.5
    inputs, lengths = made.inputs, made.lengths.tolist()
    made.set_lengths([new] * rows)

    def step() -> Tensor:
        planned = kernels.plan_decode(inputs, made.heads, made.kv, kind)
        torch.zeros(1, device=DEVICE)  # between plan and attention is another launch
        return kernels.decode_attention(q, made.kv, planned, scale, kind=kind)

    replay, out = captured(step)
    made.set_lengths(lengths)
    replay()
    wanted = expected(q, made, inputs, kind)
    check(out, wanted, BF16)
    check(exact.decode_attention(q, made.kv, inputs, scale, kind=kind), wanted, BF16)
    assert not kernels.stood_in, "a kernel refused what it should take"
    check_counters(kernels)


@EACH
def test_decode_that_rotates_and_writes(kernels: Nvidia, shape: tuple[Any, ...]) -> None:
    kind, made = kind_of(shape), case_of(shape, 16, 3000, 1)
    turn = Rotation(None, None, 1e-6, made.cos_sin, made.last_positions, made.last_slots)
    qkv = randn(16, (made.heads + 2 * made.kv_heads) * made.dim, dtype=BF16)
    written, scale = made.kv.clone(), made.dim**-0.5
    q = REFERENCE.rope_and_cache(qkv, made.heads, written, turn)
    wanted = REFERENCE.decode_attention(q.float(), written.float(), made.inputs, scale, kind=kind)
    planned = kernels.plan_decode(made.inputs, made.heads, made.kv, kind)
    check(kernels.rope_cache_attend(qkv, made.heads, made.kv, turn, planned, scale, None, kind), wanted, BF16)


@EACH
def test_trees(kernels: Nvidia, exact: InvariantNvidia, shape: tuple[Any, ...]) -> None:
    new = 9
    kind, made = kind_of(shape), case_of(shape, 8, 3000, new)
    seen_1N = lay_out_in_torch(torch.tensor([[0, 0, 1, 2, 2, 4, 0, 7]], device=DEVICE), new).seen_BN
    inputs = dataclasses.replace(made.inputs, tree_BQ=seen_1N.expand(8, new).contiguous())
    q, scale = randn(8 * new, made.heads, made.dim, dtype=BF16), made.dim**-0.5
    wanted = expected(q, made, inputs, kind)
    planned = kernels.plan_decode(inputs, made.heads, made.kv, kind)
    check(kernels.decode_attention(q, made.kv, planned, scale, kind=kind), wanted, BF16)
    check(exact.decode_attention(q, made.kv, inputs, scale, kind=kind), wanted, BF16)


@EACH
def test_prompts(kernels: Nvidia, exact: InvariantNvidia, shape: tuple[Any, ...]) -> None:
    """Whole prompts and chunks behind long prefixes; in the deterministic mode a query has its decode step's bits."""
    kind, queries, lengths = kind_of(shape), (1, 700, 33, 260), (1, 700, 3000, 1200)
    heads, kv_heads, dim, *_ = shape
    made = Case(4, heads, kv_heads, dim, 64, 3000, BF16)
    made.set_lengths(list(lengths))
    made.poison_beyond()
    if kind.window is not None:
        for row, (new, length) in enumerate(zip(queries, lengths, strict=True)):
            made.kv[:, made.table[row, : max(0, length - kind.window - new + 1) // 64].long()] = math.nan
    q, scale = randn(sum(queries), made.heads, made.dim, dtype=BF16), made.dim**-0.5
    inputs = PrefillAttention(made.table, queries, lengths)
    wanted = REFERENCE.prefill_attention(q.float(), made.kv.float(), inputs, scale, kind)
    found = kernels.prefill_attention(q, made.kv, kernels.plan_prefill(inputs, made.heads, made.kv), scale, kind)
    check(found, wanted, BF16)
    same = exact.prefill_attention(q, made.kv, exact.plan_prefill(inputs, made.heads, made.kv), scale, kind)
    check(same, wanted, BF16)
    ends = torch.tensor([0, 1, 701, 734, 994])[1:].to(DEVICE) - 1
    last = exact.decode_attention(q[ends], made.kv, made.inputs, scale, kind=kind)
    assert torch.equal(last, same[ends])


def gpu_rig(model: str, *, deterministic: bool, dtype: torch.dtype, **limits: Any) -> Any:
    device = CudaDevice(torch.device("cuda:0"))
    if "blocks" in limits:  # same_bits.py counts in blocks of 8 tokens
        limits["blocks"] //= 2
    made = select_kernels(device.torch_device, dtype, 128, "triton", deterministic=deterministic)
    return rig(
        device=device, kernels=made, shape=SHAPE | (MODELS | OF_512)[model], dtype=dtype, block_size=16, **limits
    )


@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
def test_experts_with_biases(kernels: Nvidia, exact: InvariantNvidia, tokens: int) -> None:
    """At the sizes of gpt-oss 20B, where no tile divides an expert's 2,880 features but one of 64."""
    size, count, choices = 2880, 32, 4
    up = Weight.of(randn(count, 2 * size, size, dtype=BF16) * size**-0.5, randn(count, 2 * size, dtype=BF16))
    down = Weight.of(randn(count, size, size, dtype=BF16) * size**-0.5, randn(count, size, dtype=BF16))
    x, weights = randn(tokens, size, dtype=BF16), torch.rand(tokens, choices, device=DEVICE)
    chosen = torch.rand(tokens, count, device=DEVICE).argsort(1)[:, :choices].int()
    wide_up, wide_down = (
        Weight.of(one.data.float(), None if one.bias is None else one.bias.float()) for one in (up, down)
    )
    wanted = REFERENCE.expert_mlp(x.float(), wide_up, wide_down, weights, chosen, all_experts=count, limit=1.5)
    for made in (kernels, exact):
        found = made.expert_mlp(x, up, down, weights, chosen, all_experts=count, limit=1.5)
        check(found, wanted, BF16)
    assert not kernels.stood_in, "a kernel refused what it should take"


@pytest.mark.parametrize("model", MODELS | OF_512)
def test_engines_of_the_deterministic_mode(model: str) -> None:
    """Chunks, prefix hits and evictions change no bit of an answer."""
    over = partial(gpu_rig, model, deterministic=True, dtype=BF16)
    requests = questions(1, 24, longest=60)
    wanted = plainly(over, requests)
    for name, limits, counter in (CONDITIONS[2], CONDITIONS[3], CONDITIONS[4]):
        with over(**limits) as engine:
            found = answers(engine, requests)
            assert engine.counters[counter] > 0, f"{name}: nothing was tried"
        told = difference(found, wanted)
        assert (told.flips, told.bits) == (0, 0), f"{name}: {told}"


@pytest.mark.parametrize("model", MODELS)
def test_engines_answer_as_on_a_cpu(model: str) -> None:
    """In float32, but for near-ties: nine of ten tokens."""
    requests = [replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in questions(1)]
    wanted = plainly(rig, requests, shape=SHAPE | MODELS[model])
    with gpu_rig(model, deterministic=False, dtype=torch.float32, max_prefill_tokens=16) as engine:
        found = answers(engine, requests)
    same = [
        one == other
        for number, tokens in wanted.tokens.items()
        for one, other in zip(found.tokens[number], tokens, strict=False)
    ]
    assert sum(same) >= 0.9 * len(same), f"{sum(same)} of {len(same)} tokens"
