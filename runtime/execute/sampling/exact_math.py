"""Elementary functions made of IEEE additions, multiplications and integer operations only.

Knows: a logarithm, log(1 - u) and an exponential in fixed point, whose results have the same bits on every platform, in
every lane of a vector loop and at every tensor shape. The library versions promise none of that (a vector body and its
scalar tail may differ in the last bit), and a draw that must not depend on the batch cannot stand on them.
runtime/execute/sampling/draw_triton.py repeats these formulas; it is compiled without fused multiply-add for that
reason. Does not know: what is sampled. Everything is elementwise, works in place on its own temporaries and never
syncs.

Coefficients: relative-error minimax fits in float64, rounded to float32; log(1 + f) = f * LOG(f) on [sqrt(1/2) - 1,
sqrt(2) - 1] within 3.5e-8, exp(r) = EXP(r) on [-ln(2)/2, ln(2)/2] within 1.8e-8.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_COEFFICIENTS = (
    1.0,
    -0.49999991059303284,
    0.3333395719528198,
    -0.25001785159111023,
    0.19961819052696228,
    -0.16569489240646362,
    0.14919838309288025,
    -0.14316493272781372,
    0.08740852028131485,
)
EXP_COEFFICIENTS = (
    1.0,
    1.0,
    0.4999999403953552,
    0.16666430234909058,
    0.041668009012937546,
    0.00837425421923399,
    0.0013843538472428918,
)
LN2 = 0.693147182464599609375  # float32(ln 2)
LN2_HIGH = 0.693359375  # ln 2 in two parts: n * LN2_HIGH is exact for |n| < 2**15
LN2_LOW = -2.12194440e-4
LOG2_E = 1.44269502162933349609375
SQRT_HALF_BITS = 0x3F3504F3
WEIGHT_BITS = 44  # weights are fixed point with this many fraction bits; 2**18 of them still fit in an int64
WEIGHT_FLOOR = -40.0  # exp of anything below has weight 0


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal, finite float32; absolute error below 1e-6 for results up to 25."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    fraction = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return _finish_log(fraction, exponent)


def log_one_minus(u: Tensor) -> Tensor:
    """log(1 - u) of float32 u in (0, 1), with full relative precision where u is small."""
    rest = 1.0 - u
    bits = rest.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    # Where 1 - u needs no halving, -u itself is the exact argument; 1 - u has already lost its low bits.
    reduced = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return _finish_log(torch.where(exponent == 0, -u, reduced), exponent)


def _finish_log(fraction: Tensor, exponent: Tensor) -> Tensor:
    """fraction * LOG(fraction) + exponent * ln 2."""
    series = _horner(fraction, LOG_COEFFICIENTS).mul_(fraction)
    return exponent.to(torch.float32).mul_(LN2).add_(series)


def exp_weights(x: Tensor) -> Tensor:
    """exp(x) of float32 x <= 0 as int64 in units of 2**-WEIGHT_BITS, truncated; NaN and -inf give 0.

    Sums of such weights are exact, so they do not depend on the order of summation. x = 0 gives exactly 2**WEIGHT_BITS.
    """
    x = torch.where(x > WEIGHT_FLOOR, x, WEIGHT_FLOOR)
    doublings = (x * LOG2_E).add_(0.5).floor_()
    rest = x - doublings * LN2_HIGH
    rest -= doublings * LN2_LOW
    mantissa = _horner(rest, EXP_COEFFICIENTS).mul_(1 << 24).to(torch.int64)  # in (2**23, 2**25): nothing is lost
    mantissa <<= WEIGHT_BITS - 24
    return mantissa.bitwise_right_shift_(doublings.neg_().to(torch.int64))


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """The polynomial, one rounded multiplication and one rounded addition a term."""
    total = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        total.add_(coefficient).mul_(x)
    return total.add_(coefficients[0])
