"""What top-k, top-p and min-p of a row mean to the kernels that apply them.

Knows: when each is off, and min-p as a threshold; filters.py is the torch reference. Does not know: how the other two
become thresholds (threshold_triton.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from runtime.execute.sampling.draw_triton import log, ordered, unordered


@triton.jit
def is_finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def limits(temperature, top_k, top_p, min_p, vocab):
    """(top_k or 0, top_p or 1, min_p or 0) of a row, the others meaning off; a greedy row keeps its largest."""
    is_random = temperature >= 1e-6
    k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    return tl.where(is_random, k, 1), tl.where(is_random, top_p, 1.0), tl.where(is_random, min_p, 0.0)


@triton.jit
def min_p_threshold(largest, min_p):
    """The smallest score whose distance from the largest is at least log(min_p); at most the largest; -inf if off."""
    threshold = tl.full([], float("-inf"), tl.float32)
    if min_p > 0.0:
        gap = log(tl.maximum(min_p, 1.1754943508222875e-38))
        low = tl.full([], -2139095041, tl.int64)  # the rank of -inf
        high = ordered(largest).to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            if unordered(middle.to(tl.int32)) - largest >= gap:
                high = middle
            else:
                low = middle + 1
        threshold = unordered(high.to(tl.int32))
    return threshold
