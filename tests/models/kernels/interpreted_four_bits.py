"""Products with four-bit weights through Triton's interpreter, against float64 formulas: ``TRITON_INTERPRET=1 python -m
...``.

The kernels' assembly is interpreted here, register by register, as on a GPU; its codes are checked one by one, in
bfloat16, too, whose products the interpreter does not know. Exits with an error where one differs.

Knows: shapes that reach every branch. Does not know: GPUs (tests/gpu/test_four_bits_gpu.py).
"""

from __future__ import annotations

import ctypes
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from models.kernels.experts import grouped, streamed_four_bits
from models.kernels.matmul import codes, four_bits, fragments, warpgroup
from parallel.layers.weight import E2M1, Weight, WeightFormat, int4, mxfp4, nvfp4
from tests.models.kernels import quick_interpreter  # noqa: F401  it need only be there
from tests.plant import reference_kernels

REFERENCE = reference_kernels()
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": lambda a, b, c, table: a & b | c if table == 0xEA else None,
}


def registers_after(assembly: str, word: Any) -> list[Any]:
    """Of PTX with one input, $4, and four outputs: the outputs, uint32 as the input."""
    held: dict[str, Any] = {"$4": word}
    for name, target, operands in re.findall(r"([a-z][\w.]+\.[bu]32) ([$\w]+), ([^;]+);", assembly):
        read = (held[one] if one in held else np.uint32(int(one, 0)) for one in operands.split(", "))
        held[target] = _OPERATIONS[name](*read)
    return [held[f"${number}"] for number in range(4)]


def _halves(registers: Any) -> Any:
    """float32 [..., 2] of registers [...]."""
    return np.ascontiguousarray(registers).view(np.float16).reshape(*registers.shape, 2).astype(np.float32)


def product_of_fragments(registers: list[Any], sums: list[Any]) -> list[Any]:
    """m16n8k16 of PTX: of each warp a[row, k] x b[token, k], in the order of its threads."""
    quarters = [_halves(one).reshape(-1, 8, 8) for one in registers]  # warp, g, 2t and 2t + 1
    left = np.concatenate([np.concatenate(quarters[k : k + 3 : 2], 2) for k in (0, 1)], 1)
    found = np.einsum("wrk,wtk->wrt", left, np.concatenate(quarters[4:], 2)).reshape(-1, 2, 8, 4, 2)
    return [sums[k] + found[:, k // 2, :, :, k % 2].reshape(sums[k].shape) for k in range(4)]


def _read(addresses: Any, asked: Any) -> list[Any]:
    """Of each address four words, zeros where they are not asked for."""
    found = np.zeros((4, len(addresses)), np.uint32)
    several, each = np.unique(addresses[asked], return_inverse=True)
    words = [np.frombuffer(ctypes.string_at(int(address), 16), np.uint32) for address in several]
    found[:, asked] = np.reshape(words, (-1, 4)).T[:, each]
    return list(found)


def _one_a_thread(assembly: str, values: list[Any]) -> list[Any]:
    """What fragments.py asks for."""
    bits = [one.view(np.uint32) if one.dtype == np.int32 else one for one in values]
    if "mma" in assembly:
        return product_of_fragments(bits[:6], values[6:])
    if "ld.global" in assembly:
        return _read(bits[0], bits[1] != 0 if len(bits) > 1 else np.full(len(bits[0]), True))
    if "prmt" in assembly:
        a, b = bits
        return [a & 0xFFFF | b << 16 if "0x5410" in assembly else a >> 16 | b & 0xFFFF0000]
    if assembly.startswith("fma"):
        a, b, c = (_halves(one) for one in bits)
        return [(a * b + c).astype(np.float16).view(np.uint32)[..., 0]]
    return registers_after(assembly, bits[0])


def _inline_asm(
    self: Any, assembly: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int
) -> Any:
    given = [np.ascontiguousarray(one.data) for one in values]
    if pack == 2:
        assert constraints == "=r,=r,=r,=r,r"
        found = [one.view(np.float16) for one in registers_after(assembly, given[0].view(np.uint32))]
    else:
        found = [one.view(np.int32) if one.dtype == np.uint32 else one for one in _one_a_thread(assembly, given)]
    handles = [
        interpreter.TensorHandle(np.ascontiguousarray(one).reshape(given[0].shape), kind.scalar)
        for one, kind in zip(found, types, strict=True)
    ]
    return SimpleNamespace(get_result=handles.__getitem__)


interpreter.InterpreterBuilder.create_inline_asm = _inline_asm


def check_codes() -> None:
    """Each code at each of the four places of both words of a register."""
    every = torch.arange(16)
    cases = (
        (four_bits._INT4_BFLOAT16, torch.bfloat16, every + 128.0),
        (four_bits._INT4_FLOAT16, torch.float16, every + 1024.0),
        (four_bits._E2M1_BFLOAT16, torch.bfloat16, torch.tensor(E2M1) * 2.0**-126),
        (four_bits._E2M1_FLOAT16, torch.float16, torch.tensor(E2M1) * 2.0**-14),
    )
    digits = torch.randint(0, 16, (4096, 8))
    words = (digits << (4 * torch.arange(8))).sum(1)
    for assembly, dtype, numbers in cases:
        found = registers_after(assembly.value, words.numpy().astype(np.uint32))
        for place in range(4):
            pair = torch.from_numpy(found[place].view(np.int16).copy()).view(dtype).view(-1, 2)
            expected = numbers[digits[:, [place, place + 4]]].to(dtype)
            assert torch.equal(pair.view(torch.int16), expected.view(torch.int16)), (dtype, place)


def check_scales() -> None:
    """What e2m1 scales are in 16 bits is exact, with the lift; and so are the numbers."""
    for dtype, scales in ((torch.bfloat16, range(10, 137)), (torch.float16, range(118, 128))):
        lift = four_bits._LIFT[3, dtype]
        bias = 126 if dtype == torch.bfloat16 else 14
        for scale in scales:
            numbers = torch.tensor(E2M1, dtype=torch.float64) * 2.0 ** (scale - 127) / lift
            assert torch.equal(numbers.to(dtype).double(), numbers), (dtype, scale)
            assert torch.isfinite(torch.tensor(2.0 ** (scale - 127 + bias) / lift, dtype=torch.float64).to(dtype))
        lift = four_bits._LIFT[2, dtype]
        every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        numbers = torch.tensor(E2M1, dtype=torch.float64)[:, None] * every / lift
        assert torch.equal(numbers.to(dtype).double(), numbers), dtype
        assert torch.equal((every * 2.0**bias / lift).to(dtype).double(), every * 2.0**bias / lift), dtype


def random_weight(outputs: int, inner: int, form: WeightFormat, bias: bool = False) -> Weight:
    """Products of standard normal activations are near 1; scales and zeros differ from group to group."""
    grid = form.grid(outputs, inner)
    size = inner**-0.5 / (4.0 if form.code == "int4" else 3.0)
    spread = torch.rand(grid) + 0.5
    factor = None
    if form.scale_dtype == torch.uint8:
        scale = torch.randint(-1, 2, grid).add(round(math.log2(size)) + 127).to(torch.uint8)
    elif form.factors:
        factor = (torch.rand(outputs) + 0.5) * size / 16
        scale = (spread * 16).to(form.scale_dtype)
    else:
        scale = (spread * size).to(form.scale_dtype)
    zero = torch.randint(0, 16, grid, dtype=torch.uint8) if form.zeros else None
    data = torch.randint(0, 256, (outputs, inner // 2), dtype=torch.uint8)
    offset = torch.randn(outputs).half() if bias else None
    return Weight(data, form, offset, scale, zero=zero, factor=factor)


FORMATS = (
    int4(128, torch.float16),
    int4(128, torch.float32, zeros=True),
    int4(32, torch.float16, zeros=True),
    int4(0, torch.float16),
    mxfp4(),
    nvfp4(),
)
# block_m, block_o, block_k, parts, split, stages, warps
TILES = ((8, 16, 64, 4, 1, 3, 4), (16, 32, 128, 1, 1, 3, 4), (8, 16, 128, 2, 3, 3, 2), (16, 16, 64, 1, 2, 3, 1))


def check(found: Tensor, expected: Tensor, what: object) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < 2e-3, f"{what}: relative error {error:.1e}"


def products() -> None:
    """Every format in every tile; K that parts, splits and steps do not divide; with SiLU-mul, with a bias."""
    partial, counters = torch.full((1 << 16,), math.nan), torch.zeros(64, dtype=torch.int32)
    for each, form in enumerate(FORMATS):
        for inner in (512, 384):
            for number, (block_m, block_o, block_k, parts, split, stages, warps) in enumerate(TILES):
                if (each + number) % 2 == (inner == 384):
                    continue
                gate_up, rows = number % 2 == 1, (1, 13, 5, 20)[number]
                weight = random_weight(64, inner, form, bias=not gate_up)
                x = torch.randn(rows, inner).half()
                found = four_bits.four_bits(
                    *(x, weight, partial, counters),
                    gate_up=gate_up, block_m=block_m, block_o=block_o, block_k=block_k, parts=parts, split=split,
                    stages=stages, warps=warps, prefetch=0, pdl=False,
                )  # fmt: skip
                expected = x.double() @ weight.plain(torch.float64).t()
                if weight.bias is not None:
                    expected += weight.bias.double()
                if gate_up:
                    gate, up = expected.chunk(2, -1)
                    expected = torch.nn.functional.silu(gate) * up
                check(found, expected, (form.name, inner, TILES[number]))
    assert not counters.any(), "a split product left its counters set"


def registers() -> None:
    """Products in registers, of every format; K that warps, programs and steps do not divide."""
    partial, counters = torch.full((1 << 13,), math.nan), torch.zeros(4, dtype=torch.int32)
    for form, inner, rows, split, ahead, warps in (
        (FORMATS[0], 512, 1, 1, 2, 2),
        (FORMATS[1], 384, 8, 2, 1, 1),
        (FORMATS[2], 352, 5, 1, 1, 4),
        (FORMATS[3], 384, 3, 1, 1, 2),
        (FORMATS[4], 352, 3, 2, 1, 1),
        (FORMATS[5], 512, 2, 1, 1, 4),
        (FORMATS[0], 640, 7, 1, 2, 0),  # without a number of warps, by a warpgroup
        (FORMATS[1], 384, 18, 2, 1, 0),
        (FORMATS[2], 352, 3, 2, 2, 0),
        (FORMATS[3], 256, 2, 1, 2, 0),
        (FORMATS[4], 352, 29, 1, 1, 0),
        (FORMATS[5], 256, 8, 1, 2, 0),
    ):
        gate_up = rows % 2 == 1
        weight, x = random_weight(64, inner, form, bias=not gate_up), torch.randn(rows, inner).half()
        given: dict[str, Any] = {"gate_up": int(gate_up), "split": split, "ahead": ahead, "pdl": False}
        if warps:
            found = fragments.fragments(x, weight, partial, counters, warps=warps, **given)
        else:
            found = warpgroup.warpgroup(x, weight, partial, counters, **given)
        expected = x.double() @ weight.plain(torch.float64).t()
        if weight.bias is not None:
            expected += weight.bias.double()
        if gate_up:
            gate, up = expected.chunk(2, -1)
            expected = torch.nn.functional.silu(gate) * up
        check(found, expected, (form.name, inner, given, warps))
    assert not counters.any(), "a split product left its counters set"


def experts() -> None:
    """Few tokens, each pair for itself, and lists; with biases and a clamped activation, without a gate."""
    tokens, choices, count, hidden, inner = 3, 2, 3, 96, 32
    for form, matrices, limit in (
        (mxfp4(), 2, 1.0),
        (nvfp4(), 1, None),
        (int4(32, torch.float16, zeros=True), 2, None),
    ):
        up, down = (
            stacked([random_weight(*sizes, form, bias=limit is not None) for _ in range(count)])
            for sizes in ((matrices * inner, hidden), (hidden, inner))
        )
        x, weights = torch.randn(tokens, hidden).half(), torch.rand(tokens, choices)
        chosen = torch.stack([torch.randperm(count)[:choices] for _ in range(tokens)]).int()
        chosen[0, 1] = -1
        biases = [None if one.bias is None else one.bias.double() for one in (up, down)]
        wide, last = (Weight.of(one.plain(torch.float64), bias) for one, bias in zip((up, down), biases, strict=True))
        expected = REFERENCE.expert_mlp(
            x.double(), wide, last, weights.double(), chosen, all_experts=count, limit=limit
        )
        runs: dict[str, Callable[..., Tensor]] = {
            "streamed": streamed_four_bits.expert_mlp,
            "lists": partial(grouped.expert_mlp, all_experts=count),
        }
        for name, run in runs.items():
            found = run(x, up, down, weights, chosen, False, limit=limit)
            check(found, expected, (name, form.name, matrices, limit))


def stacked(matrices: list[Weight]) -> Weight:
    """Of experts."""

    def each(name: str) -> Any:
        tensors = [getattr(one, name) for one in matrices]
        return None if tensors[0] is None else torch.stack(tensors)

    more = {name: each(name) for name in ("bias", "scale", "zero", "factor")}
    return Weight(each("data"), matrices[0].format, **more)


def decoding() -> None:
    """The numbers of a matrix in a launch of their own, to the bit."""
    for form in (*FORMATS, mxfp4(16)):
        weight = random_weight(24, 96, form)
        if form.scale_dtype == torch.uint8:
            assert weight.scale is not None
            weight.scale[0, :2] = torch.tensor([0, 254])
        for dtype in (torch.float16, torch.float32):
            assert torch.equal(codes.decoded(weight, dtype, False), weight.plain(dtype)), (form.name, dtype)
        if form.scale_dtype == torch.float8_e4m3fn:  # as GPUs before sm_89 read scales
            assert weight.scale is not None
            as_bytes = replace(weight, scale=weight.scale.view(torch.uint8))
            assert torch.equal(codes.decoded(as_bytes, torch.float32, False), weight.plain(torch.float32))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for part in (check_codes, check_scales, products, registers, experts, decoding):
        began = time.perf_counter()
        part()
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
