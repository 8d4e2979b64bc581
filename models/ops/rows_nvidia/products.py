"""Rows of matrix products on NVIDIA GPUs: cuBLAS, cuBLASLt's algorithms, and our kernels for few rows.

Knows: which shapes and configurations each can run, and how it is called. Does not know: which is fastest (tuned.py),
or how a kernel computes. Each row serves x W^T (+ bias); what its ``form`` lacks, a launch before or after it does:

    normed   rms_norm(x + residual) comes first
    gate_up  SiLU-mul of the two halves of the result follows
    pushes   the result goes into the peers' buffers, too

``ops`` of these rows is the TunedProducts; ``call`` a LinearShape; ``config`` a Choice. What ``bind`` returns is called
with (x, weight, residual, norm, eps, buffers, into), the last five optional, and returns (result, x + residual). It
serves every shape of that choice and form (tuned.py shares it): what depends on a matrix comes from ``weight``.
A choice that ``reads_codes`` gets x as ``Quantised``: made by the norm, or by what made x, else in a separate launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels.matmul import codes, four_bits, fragments, gemv, norm, skinny, warpgroup, wide
from models.kernels.matmul.candidates import (
    MOST_FRAGMENT_ROWS,
    MOST_GEMV_ROWS,
    MOST_WARPGROUP_ROWS,
    first_wave,
    gemv_candidates,
    skinny_candidates,
    wide_candidates,
)
from models.kernels.matmul.choice_table import (
    Blas,
    Choice,
    CublasLt,
    Decoded,
    FourBits,
    Fragments,
    Gemv,
    LinearShape,
    Scaled,
    Skinny,
    Warpgroup,
    Wide,
)
from models.ops.table import Row, Run
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.quantised import Activations, Quantised, numbers_of
from parallel.layers.weight import Weight

MAX_PUSHED_ROWS = 32  # on two H200s steps of 128 and 256 rows got longer by pushing
_ALGORITHMS = 40  # of cuBLASLt, in a full search; a start-up tries the first few


Product = Callable[..., tuple[Tensor, Tensor]]


def reads_codes(shape: LinearShape, choice: Choice) -> bool:
    """Whether activations are quantised before ``choice`` multiplies them."""
    narrow = isinstance(choice, (Scaled, Wide)) or (isinstance(choice, Skinny) and choice.narrow)
    return narrow and shape.stored is not None


def product(products: Any, shape: LinearShape, choice: Choice, into: bool = False) -> tuple[Product, bool]:
    """(what runs ``shape`` by ``choice``, whether it pushes its result where it is given buffers). ``into``: it gets
    memory for codes.
    """
    row = ROWS[type(choice)]
    run = row.bind(products, shape, choice)
    if shape.stored is not None and not reads_codes(shape, choice):
        run = partial(_of_numbers, run)
    if shape.gate_up and "gate_up" not in row.form:
        run = partial(_then_silu, run, products.pdl)
    elif into:
        run = partial(_then_codes, run, products.pdl)
    if shape.normed and not ("normed" in row.form and getattr(choice, "fold", True)):
        run = partial(_after_norm, run, products.pdl, reads_codes(shape, choice))
    return run, "pushes" in row.form and shape.rows <= MAX_PUSHED_ROWS


def _after_norm(
    run: Product, pdl: bool, coded: bool, x_MK: Tensor, weight: Weight, residual_MK: Tensor | None, norm_K: Tensor,
    eps: float, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """May overwrite ``residual`` and, in large steps, ``x`` (norm.py)."""
    codes_MK = None
    if coded and weight.format.activation_cap is None:
        codes_MK = Quantised.empty(x_MK.shape[0], weight.inner, codes.group_of(weight), x_MK.dtype, x_MK.device)
    hidden_MK = norm.rms_norm(x_MK, residual_MK, norm_K, eps, pdl, codes_MK)
    return run(codes_MK or hidden_MK, weight, **options)[0], x_MK if residual_MK is None else residual_MK


def _of_numbers(run: Product, x_MK: Activations, weight: Weight, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Of numbers in the order of the weight's columns."""
    x_MK = numbers_of(x_MK)
    if weight.order is not None:
        x_MK = x_MK.index_select(1, weight.order)
    return run(x_MK, weight, *rest, **options)


def _then_silu(
    run: Product, pdl: bool, x_MK: Activations, weight: Weight, into: Quantised | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    out_MO, total_MK = run(x_MK, weight, **options)
    return norm.silu_mul(out_MO, pdl, into, gelu=weight.gelu), total_MK


def _then_codes(
    run: Product, pdl: bool, x_MK: Activations, *norm: Any, into: Quantised, **options: Any
) -> tuple[Tensor, Tensor]:
    """Tiles so wide that they have whole groups of their result were slower than this launch on an H200."""
    out_MO, total_MK = run(x_MK, *norm, **options)
    return codes.quantise(out_MO, into.group, pdl, into).codes, total_MK


def _as_codes(x_MK: Activations, weight: Weight, pdl: bool) -> Quantised:
    group = codes.group_of(weight)
    if isinstance(x_MK, Quantised) and x_MK.group == group:
        return x_MK
    return codes.quantised_by(weight, numbers_of(x_MK), pdl)


def _form(shape: LinearShape, weight: Weight) -> int:
    """The kernels' ``gate_up``."""
    return 2 if shape.gate_up and weight.gelu else int(shape.gate_up)


def _fused(kernel: Product, shape: LinearShape) -> Product:
    """Of a kernel that takes everything in one launch."""

    def run(
        x_MK: Activations, weight: Weight, residual_MK: Tensor | None = None, norm_K: Tensor | None = None,
        eps: float = 0.0, buffers: PeerBuffers | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if weight.scale is not None:
            options |= {"scale": weight.scale, "block": weight.format.block}
        options |= {"norm_K": norm_K, "eps": eps, "residual_MK": residual_MK, "buffers": buffers}
        return kernel(x_MK, codes.readable(weight.data), weight.bias, gate_up=_form(shape, weight), **options)

    return run


def _gemv(products: Any, shape: LinearShape, choice: Gemv) -> Run:
    waves = first_wave(products.traits)
    given = dataclasses.asdict(choice)
    return _fused(partial(gemv.gemv, first_wave=waves, pdl=products.pdl, **given), shape)


def _skinny(products: Any, shape: LinearShape, choice: Skinny) -> Run:
    run, pdl = _fused(partial(skinny.skinny, **_shared(products, choice)), shape), products.pdl
    if not choice.narrow:
        return run
    return lambda x_MK, weight, **options: run(_as_codes(x_MK, weight, pdl), weight, **options)


def _wide(products: Any, shape: LinearShape, choice: Wide) -> Run:
    kernel: Run = partial(wide.wide, **_shared(products, choice))
    pdl = products.pdl

    def run(x_MK: Activations, weight: Weight, buffers: PeerBuffers | None = None) -> tuple[Tensor, Any]:
        form = _form(shape, weight)
        if weight.format.block is None:
            return kernel(x_MK, weight.data, weight.bias, gate_up=form), x_MK
        scaled = {"scale": weight.scale, "block": weight.format.block}
        return kernel(_as_codes(x_MK, weight, pdl), weight.data, weight.bias, gate_up=form, **scaled), x_MK

    return run


def _scaled(products: Any, shape: LinearShape, choice: Scaled) -> Run:
    pdl = products.pdl

    def run(x_MK: Activations, weight: Weight, buffers: PeerBuffers | None = None) -> tuple[Tensor, Any]:
        block = weight.format.block
        assert weight.scale is not None
        assert block is not None
        x = _as_codes(x_MK, weight, pdl)
        scales = (x.scale.t(), weight.scale.t()) if block[1] else (x.scale.view(-1, 1), weight.scale.view(1, -1))
        out_MO = torch._scaled_mm(x.codes, weight.data.t(), *scales, out_dtype=x.dtype)[: x.tokens]
        return (out_MO if weight.bias is None else out_MO + weight.bias), x_MK

    return run


def _decoded(products: Any, shape: LinearShape, choice: Decoded) -> Run:
    pdl = products.pdl

    def run(x_MK: Tensor, weight: Weight, buffers: PeerBuffers | None = None) -> tuple[Tensor, Tensor]:
        return F.linear(x_MK, codes.decoded(weight, x_MK.dtype, pdl), weight.bias), x_MK

    return run


def _shared(products: Any, choice: Skinny | Wide | FourBits | Fragments | Warpgroup) -> dict[str, Any]:
    """What all take: workspaces, the configuration."""
    given = dataclasses.asdict(choice)
    for field in ("fold", "narrow"):
        given.pop(field, None)
    return {"partial": products._partial, "counters": products._counters, "pdl": products.pdl, **given}


def by_library(products: Any, choice: Choice) -> Run:
    """Called with (x, weight, out, which is optional): x W^T without a bias."""
    lt = products._lt
    if isinstance(choice, (Scaled, Decoded, FourBits, Fragments, Warpgroup)):
        return lambda x_MK, weight, out_MO: out_MO.copy_(products.linear(x_MK, weight))
    if isinstance(choice, CublasLt) and lt is not None:
        return lambda x_MK, weight, out_MO=None: lt.run(x_MK, weight.data, choice.algorithm, out_MO)
    return lambda x_MK, weight, out_MO=None: torch.mm(x_MK, weight.data.t(), out=out_MO)


def _library(products: Any, shape: LinearShape, choice: Choice) -> Run:
    multiply = by_library(products, choice)

    def run(x_MK: Tensor, weight: Weight, buffers: PeerBuffers | None = None) -> tuple[Tensor, Tensor]:
        if weight.bias is not None:
            return F.linear(x_MK, weight.data, weight.bias), x_MK
        return multiply(x_MK, weight), x_MK

    return run


def algorithms(products: Any, shape: LinearShape) -> list[Choice]:
    lt = products._lt
    if lt is None or shape.rows < 16 or shape.dtype not in (torch.bfloat16, torch.float16):
        return []
    names = lt.algorithms(shape.rows, shape.outputs, shape.inner, shape.dtype, most=_ALGORITHMS)
    return [CublasLt(name, lt.version) for name in names]


def _numbers(refuses: Run | None = None) -> Run:
    """Of a row for weights in the dtype of activations."""

    def refuse(products: Any, shape: LinearShape, choice: Choice, measured: int | None) -> str | None:
        if shape.stored is not None:
            return "weights that are codes"
        reason: str | None = None if refuses is None else refuses(products, shape, choice, measured)
        return reason

    return refuse


# Why a row cannot run ``shape`` with ``choice``, which was ``measured`` for so many rows; None: for those of ``shape``.


def _lt_refuses(products: Any, shape: LinearShape, choice: CublasLt, measured: int | None) -> str | None:
    """An algorithm of another version means nothing; one of other rows or GPUs fits where the library says so."""
    lt = products._lt
    if lt is None or choice.version != lt.version:
        return "an algorithm of another version of cuBLASLt"
    exact = products._measured_here and measured in (None, shape.rows)
    if exact or lt.can_run(shape.rows, shape.outputs, shape.inner, shape.dtype, choice.algorithm):
        return None
    return "an algorithm for other rows"


def _gemv_refuses(products: Any, shape: LinearShape, choice: Gemv, measured: int | None) -> str | None:
    if shape.rows > MOST_GEMV_ROWS or shape.four_bits:
        return f"more than {MOST_GEMV_ROWS} rows, or four-bit weights"
    if shape.block is None:
        return None
    return _BLOCK if (shape.block[1] or shape.inner) % 8 else _activations_refuse(products, narrow=False)


def _activations_refuse(products: Any, *, narrow: bool) -> str | None:
    """Whether activations may be quantised is the user's choice (``--fp8-activations``)."""
    refused = {"never": narrow, "always": not narrow}.get(products.fp8_activations, False)
    return f"--fp8-activations {products.fp8_activations}" if refused else None


def _scaled_refuses(products: Any, shape: LinearShape, choice: Scaled, measured: int | None) -> str | None:
    """cuBLASLt's blocks are of 128; sums are silently wrong where their number is no multiple of 4 (pytorch#166752)."""
    if shape.block is None or shape.four_bits or not products.traits.hopper or shape.outputs % 16 or shape.inner % 16:
        return "no FP8 weights, or not on this GPU"
    whole = shape.inner % 512 == 0 and shape.outputs % 128 == 0 if shape.block == (128, 128) else shape.block == (1, 0)
    if not whole or (shape.block == (1, 0) and shape.dtype != torch.bfloat16):
        return _BLOCK
    return _activations_refuse(products, narrow=True)


def _decoded_refuses(products: Any, shape: LinearShape, choice: Decoded, measured: int | None) -> str | None:
    return "no weights that are codes" if shape.stored is None else None


def _four_bits_refuses(products: Any, shape: LinearShape, choice: FourBits, measured: int | None) -> str | None:
    if not shape.four_bits or shape.dtype not in (torch.bfloat16, torch.float16):
        return "no four-bit weights, or activations of 32 bits"
    if shape.outputs % choice.block_o or not four_bits.fits(shape.format, shape.inner, choice.block_k):
        return _BLOCK
    floats = four_bits.workspace_floats(shape.rows, shape.outputs, choice.block_m, choice.split)
    tiles = shape.outputs // choice.block_o * -(-shape.rows // choice.block_m)
    if floats > products._partial.numel() or (choice.split > 1 and tiles > skinny.COUNTERS):
        return _WORKSPACE
    fits = four_bits.shared_bytes(choice.block_m, choice.block_o, choice.block_k * choice.parts, choice.stages)
    return None if fits <= products.traits.shared_bytes else "too little shared memory"


def _fragments_refuses(products: Any, shape: LinearShape, choice: Fragments, measured: int | None) -> str | None:
    if not shape.four_bits or shape.dtype not in (torch.bfloat16, torch.float16) or shape.rows > MOST_FRAGMENT_ROWS:
        return f"no four-bit weights, activations of 32 bits, or more than {MOST_FRAGMENT_ROWS} rows"
    if not fragments.fits(shape.format, shape.outputs, shape.inner):
        return _BLOCK
    enough = fragments.workspace_floats(shape.outputs, choice.split) <= products._partial.numel()
    return None if enough and (choice.split == 1 or shape.outputs // 16 <= skinny.COUNTERS) else _WORKSPACE


def _warpgroup_refuses(products: Any, shape: LinearShape, choice: Warpgroup, measured: int | None) -> str | None:
    if not shape.four_bits or shape.dtype not in (torch.bfloat16, torch.float16) or shape.rows > MOST_WARPGROUP_ROWS:
        return f"no four-bit weights, activations of 32 bits, or more than {MOST_WARPGROUP_ROWS} rows"
    if not warpgroup.fits(shape.format, shape.outputs, shape.inner, choice.split, choice.ahead):
        return _BLOCK
    enough = warpgroup.workspace_floats(shape.rows, shape.outputs, choice.split) <= products._partial.numel()
    few = choice.split == 1 or shape.outputs // warpgroup.BLOCK_O <= skinny.COUNTERS
    return None if enough and few else _WORKSPACE


def _skinny_refuses(products: Any, shape: LinearShape, choice: Skinny, measured: int | None) -> str | None:
    if shape.four_bits:
        return "four-bit weights"
    floats = skinny.workspace_floats(shape.rows, shape.outputs, choice.block_m, choice.block_o, choice.split)
    tiles = shape.outputs // choice.block_o * -(-shape.rows // choice.block_m)
    if floats > products._partial.numel() or (choice.split > 1 and tiles > skinny.COUNTERS):
        return _WORKSPACE
    if shape.block is not None:
        columns = shape.block[1] or shape.inner
        if columns % choice.block_k or shape.inner % choice.block_k or (choice.narrow and not _whole_groups(shape)):
            return _BLOCK
        if choice.narrow and choice.fold:
            return "a norm in the kernel, where codes are read"
        if reason := _activations_refuse(products, narrow=choice.narrow):
            return reason
    elif choice.narrow:
        return "no FP8 weights"
    return _shared_memory_refuses(products, shape, choice)


def _wide_refuses(products: Any, shape: LinearShape, choice: Wide, measured: int | None) -> str | None:
    if not products.pdl or shape.rows > choice.block_m or shape.four_bits:
        return f"more than {choice.block_m} rows, four-bit weights, or a GPU without TMA"
    if shape.block is not None:
        columns = shape.block[1] or shape.inner
        if columns % choice.block_k or not _whole_groups(shape):
            return _BLOCK
        if reason := _activations_refuse(products, narrow=True):
            return reason
    floats = wide.workspace_floats(shape.outputs, choice.block_m, choice.split)
    if floats > products._partial.numel() or shape.outputs // choice.block_o > skinny.COUNTERS:
        return _WORKSPACE
    return _shared_memory_refuses(products, shape, choice)


def _shared_memory_refuses(products: Any, shape: LinearShape, choice: Skinny | Wide) -> str | None:
    """Asked of what another model of GPU chose."""
    tile = choice.stages * choice.block_k * (choice.block_m + choice.block_o) * shape.dtype.itemsize
    fits = products._measured_here or tile <= products.traits.shared_bytes
    return None if fits else "too little shared memory"


def _whole_groups(shape: LinearShape) -> bool:
    """Whether activations are quantised for ``shape``: groups are powers of two, or rows."""
    columns = shape.block[1] if shape.block else 0
    return columns == 0 or (columns & (columns - 1) == 0 and shape.inner % columns == 0)


_WORKSPACE = "too little workspace"
_BLOCK = "blocks of scales that its tiles do not divide"


def _ours(config: type, bind: Run, find: Run, refuses: Run, *form: str) -> Row:
    """Of a kernel whose configurations ``find`` lists for a GPU."""
    return Row("product", bind, frozenset(form), refuses, lambda products, shape: find(shape, products.traits), config)


def _codes(config: type, kernel: Run, refuses: Run) -> Row:
    """Of a kernel for four-bit weights."""

    def bind(products: Any, shape: LinearShape, choice: FourBits | Fragments | Warpgroup) -> Run:
        run = partial(kernel, **_shared(products, choice))
        return lambda x, weight, buffers=None: (run(x, weight, buffers=buffers, gate_up=_form(shape, weight)), x)

    return Row("product", bind, frozenset(("gate_up", "pushes")), refuses, config=config)


ROWS: dict[type, Row] = {
    Blas: Row("product", _library, refuses=_numbers(), variants=lambda products, shape: [Blas()], config=Blas),
    CublasLt: Row("product", _library, refuses=_numbers(_lt_refuses), variants=algorithms, config=CublasLt),
    Skinny: _ours(Skinny, _skinny, skinny_candidates, _skinny_refuses, "normed", "gate_up", "pushes"),
    Gemv: _ours(Gemv, _gemv, gemv_candidates, _gemv_refuses, "normed", "gate_up", "pushes"),
    Wide: _ours(Wide, _wide, wide_candidates, _wide_refuses, "gate_up"),
    FourBits: _codes(FourBits, four_bits.four_bits, _four_bits_refuses),
    Fragments: _codes(Fragments, fragments.fragments, _fragments_refuses),
    Warpgroup: _codes(Warpgroup, warpgroup.warpgroup, _warpgroup_refuses),
    Scaled: Row("product", _scaled, refuses=_scaled_refuses, config=Scaled),
    Decoded: Row("product", _decoded, refuses=_decoded_refuses, config=Decoded),
}
