"""Random four-bit checkpoints of every producer, and the float32 weights that they mean: the oracle of their loading.

Knows: the formulas and the names and packing that producers use. Imports nothing of the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Kept = Callable[[str], bool]
Made = tuple[dict[str, Tensor], Tensor]  # tensors by suffix, and the matrix that they mean


@dataclass(frozen=True)
class Scheme:
    """``make(rows, columns, seed, size)``: a random matrix whose numbers are about ``size``. ``config``:
    quantization_config without its ignore list, which stands under ``ignore``."""

    make: Callable[[int, int, int, float], Made]
    config: Mapping[str, Any]
    ignore: str


def words(codes: Tensor) -> Tensor:
    """int32 [..., n / 8] of codes [..., n], the first in the lowest bits."""
    eight = codes.to(torch.int64).reshape(*codes.shape[:-1], -1, 8)
    sums = sum(eight[..., j] << 4 * j for j in range(8))
    return torch.as_tensor(sums).where(torch.as_tensor(sums) < 2**31, torch.as_tensor(sums) - 2**32).to(torch.int32)


def padded(codes: Tensor, dim: int) -> Tensor:
    """With zeros up to a multiple of 8."""
    missing = list(codes.shape)
    missing[dim] = -codes.shape[dim] % 8
    return torch.cat((codes, torch.zeros(missing, dtype=codes.dtype)), dim)


def integers(
    rows: int, columns: int, seed: int, size: float, group: int, zeros: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """(codes [N, K], scales [N, groups], zeros [N, groups], meaning of codes by the group of each column)"""
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=made)
    groups = -(-columns // (group or columns))
    scale = ((torch.rand(rows, groups, generator=made) + 0.2) * size / 8).to(dtype)
    scale[0, 0] = 0.0
    zero = torch.randint(1, 15, (rows, groups), generator=made) if zeros else torch.full((rows, groups), 8)

    def meant(group_of: Tensor) -> Tensor:
        return (codes - zero[:, group_of]).float() * scale.float()[:, group_of]

    return codes, scale, zero, meant


def in_order(columns: int, group: int) -> Tensor:
    return torch.arange(columns) // (group or columns)


def shuffled(columns: int, group: int, seed: int) -> Tensor:
    return in_order(columns, group)[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]


def compressed_int4(group: int, zeros: bool, dtype: torch.dtype, order: str | None = None) -> Callable[..., Made]:
    def make(rows: int, columns: int, seed: int, size: float) -> Made:
        codes, scale, zero, meant = integers(rows, columns, seed, size, group, zeros, dtype)
        found = {"weight_packed": words(padded(codes, 1)), "weight_scale": scale}
        found["weight_shape"] = torch.tensor([rows, columns])
        group_of = in_order(columns, group)
        if zeros:
            found["weight_zero_point"] = words(padded(zero, 0).t()).t().contiguous()
        if order == "group":
            group_of = shuffled(columns, group, seed)
            found["weight_g_idx"] = group_of.to(torch.int32)
        return found, meant(group_of)

    return make


def awq(group: int) -> Callable[..., Made]:
    def make(rows: int, columns: int, seed: int, size: float) -> Made:
        codes, scale, zero, meant = integers(rows, columns, seed, size, group, True, torch.float16)

        def pack(x: Tensor) -> Tensor:
            eight = padded(x.t(), 1).reshape(x.shape[1], -1, 8)
            return words(eight[..., AWQ_ORDER].flatten(1))

        found = {"qweight": pack(codes), "qzeros": pack(zero), "scales": scale.t().contiguous()}
        return found, meant(in_order(columns, group))

    return make


def gptq(group: int, *, symmetric: bool, stored_less: int, act: bool = False) -> Callable[..., Made]:
    """``stored_less``: what is taken off zeros before they are stored: 1 in the first version, 0 in the second."""

    def make(rows: int, columns: int, seed: int, size: float) -> Made:
        codes, scale, zero, meant = integers(rows, columns, seed, size, group, not symmetric, torch.float16)
        group_of = shuffled(columns, group, seed) if act else in_order(columns, group)
        less = torch.full_like(zero, stored_less)
        found = {
            "qweight": words(codes).t().contiguous(),
            "qzeros": words(padded(zero - less, 0).t()) if not symmetric else words(_full_words(zero - less)),
            "scales": scale.t().contiguous(),
            "g_idx": group_of.to(torch.int32),
        }
        return found, meant(group_of)

    return make


def _full_words(zero: Tensor) -> Tensor:
    """Of one value, also in the padding, as producers write them."""
    return torch.full((zero.shape[1], -(-zero.shape[0] // 8) * 8), int(zero[0, 0]))


def e2m1(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """(bytes [N, K / 2], numbers [N, K])"""
    codes = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed))
    numbers = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), numbers


def nvfp4(reciprocal: bool) -> Callable[..., Made]:
    def make(rows: int, columns: int, seed: int, size: float) -> Made:
        data, numbers = e2m1(rows, columns, seed)
        made = torch.Generator().manual_seed(seed)
        scale = (torch.rand(rows, columns // 16, generator=made) * 400 + 20).to(torch.float8_e4m3fn)
        scale.view(torch.uint8)[0, 0] = 0
        second = torch.tensor(size / 3 / 200)
        wide = numbers * scale.float().repeat_interleave(16, 1)
        if reciprocal:
            second = 1 / second
            found = {"weight_packed": data, "weight_global_scale": second.reshape(1)}
            found["input_global_scale"] = torch.tensor([0.5])
            return found | {"weight_scale": scale}, wide / second
        found = {"weight": data, "weight_scale_2": second, "input_scale": torch.tensor(0.5)}
        return found | {"weight_scale": scale}, wide * second

    return make


def mxfp4(rows: int, columns: int, seed: int, size: float) -> Made:
    data, numbers = e2m1(rows, columns, seed)
    made = torch.Generator().manual_seed(seed)
    near = int(torch.log2(torch.tensor(size)))
    exponent = torch.randint(near + 122, near + 127, (rows, columns // 32), dtype=torch.uint8, generator=made)
    found = {"weight_packed": data, "weight_scale": exponent}
    return found, numbers * 2.0 ** (exponent.float() - 127).repeat_interleave(32, 1)


def gpt_oss_experts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(stored, meant) of a gpt-oss checkpoint whose experts [E, K, N] become blocks [E, N, K / 32, 16] and scales."""
    stored, meant = dict(tensors), dict(tensors)
    for seed, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        experts, columns, rows = tensors[name].shape
        parts, numbers = mxfp4(experts * rows, columns, seed, (3 / columns) ** 0.5)
        del stored[name]
        stored[f"{name}_blocks"] = parts["weight_packed"].view(experts, rows, columns // 32, 16)
        stored[f"{name}_scales"] = parts["weight_scale"].view(experts, rows, -1)
        meant[name] = numbers.view(experts, rows, columns).transpose(1, 2).contiguous()
    return stored, meant


def compressed(format_: str, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def schemes(group: int = 32) -> dict[str, Scheme]:
    """By name; those of ``ordered`` apart, which only one rank takes."""
    half, brain = torch.float16, torch.bfloat16
    ints = {"type": "int", "strategy": "group", "group_size": group}
    packed, floats = "pack-quantized", {"type": "float", "group_size": 16, "strategy": "tensor_group"}
    of_gptq = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False}
    of_awq = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    kept, ignore = "modules_to_not_convert", "ignore"
    per_row = {"type": "int", "strategy": "channel", "group_size": -1}
    blocks = {"type": "float", "strategy": "group", "group_size": 32}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"*": {"quant_algo": "NVFP4", "group_size": 16}}}
    return {
        "int4": Scheme(compressed_int4(group, False, brain), compressed(packed, **ints), ignore),
        "int4-weight-order": Scheme(
            compressed_int4(group, False, half), compressed(packed, **ints, actorder="weight"), ignore
        ),
        "int4-zeros": Scheme(compressed_int4(group, True, half), compressed(packed, **ints, symmetric=False), ignore),
        "int4-channel": Scheme(compressed_int4(0, False, torch.float32), compressed(packed, **per_row), ignore),
        "awq": Scheme(awq(group), of_awq, kept),
        "gptq": Scheme(gptq(group, symmetric=True, stored_less=1), {**of_gptq, "sym": True}, kept),
        "gptq-stored-as-v2": Scheme(gptq(group, symmetric=True, stored_less=0), {**of_gptq, "sym": True}, kept),
        "gptq-zeros": Scheme(gptq(group, symmetric=False, stored_less=1), {**of_gptq, "sym": False}, kept),
        "gptq-v2-zeros": Scheme(
            gptq(group, symmetric=False, stored_less=0),
            {**of_gptq, "sym": False, "checkpoint_format": "gptq_v2"},
            kept,
        ),
        "gptq-channel": Scheme(gptq(0, symmetric=True, stored_less=1), {**of_gptq, "group_size": -1}, kept),
        "mxfp4": Scheme(mxfp4, compressed("mxfp4-pack-quantized", **blocks), ignore),
        "nvfp4": Scheme(nvfp4(reciprocal=True), compressed("nvfp4-pack-quantized", **floats), ignore),
        "nvfp4-modelopt": Scheme(nvfp4(reciprocal=False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, ignore),
        "nvfp4-mixed": Scheme(nvfp4(reciprocal=False), {"quant_method": "modelopt", **mixed}, ignore),
    }


def ordered(group: int = 32) -> dict[str, Scheme]:
    """Whose groups have columns from anywhere."""
    ints = {"type": "int", "strategy": "group", "group_size": group, "actorder": "group"}
    of_gptq = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": True, "sym": True}
    made = gptq(group, symmetric=True, stored_less=1, act=True)
    return {
        "int4-order": Scheme(
            compressed_int4(group, True, torch.float16, "group"),
            compressed("pack-quantized", **{**ints, "symmetric": False}),
            "ignore",
        ),
        "gptq-order": Scheme(made, of_gptq, "modules_to_not_convert"),
    }


def quantise(
    tensors: Mapping[str, Tensor], scheme: Scheme, kept: Kept, ignored: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """(stored tensors, the float32 tensors that they mean, quantization_config): as in quantised.py.

    The first scale of each matrix is 0, and every third matrix is ten times as large.
    """
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if kept(name) or tensor.dim() != 2 or not name.endswith(".weight"):
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape
        size = (3 / columns) ** 0.5 * (10.0 if number % 3 == 0 else 1.0)
        parts, meant[name] = scheme.make(rows, columns, number, size)
        base = name.removesuffix("weight")
        stored |= {base + suffix: part.contiguous() for suffix, part in parts.items()}
    return stored, meant, {**scheme.config, scheme.ignore: ignored}
