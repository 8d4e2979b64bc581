"""Gumbel-argmax over logits, and the end of a step's sampling, in one Triton launch each.

Knows: float32 or bfloat16 logits [B, V] in rows of any stride, per-row parameters as columns of any stride (views of
the slot records), and the packed candidates of runtime/execute/sampling/packed_argmax.py. Its torch reference is
sampler.py there with counter_rng.py and exact_math.py, whose arithmetic it repeats operation by operation: every
kernel is launched without fused multiply-add, so noise, scores and tokens have the same bits.
Does not know: slots, filters (shares_triton.py finds their threshold), what a finish code means to a host.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.dependent_launch import dependent_launches
from models.kernels.traits import H200

NO_CANDIDATE = -(2**63)
# Numbers and pointers that make no other code by being 1 or divisible by 16, so that any number of rows, and parameters
# as columns of records or as separate tensors, run what was compiled once.
COLUMNS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "position", "stop_ids", "min_length", "max_length", "finished"),
    *("repetition", "frequency", "presence", "tokens", "evidence"),
)
ANY_NUMBER = [*(f"{column}_stride" for column in COLUMNS), "stop_id_stride", "keys_stride", "parts", "vocab_start"]
ANY_NUMBER += ["candidates", "stop_ids", "entries", "whole_vocab", "top", "top_n", "recent_stride"]
ANY_POINTER = [f"{name}_ptr" for name in (*COLUMNS, "token", "ok", "count", "finish", "threshold", "largest", "keys")]
ANY_POINTER += ["slots_ptr", "recent_ptr", "states_ptr", "ids_ptr"]  # of rows: views, or made in the step
EXACT = {"enable_fp_fusion": False}  # a * b + c must round twice, as it does in torch
_BLOCK = 2048
_CANDIDATES = 128  # that one program of conclude reads at least: as many as rows of 262,144 logits are cut into
_PROGRAMS = 4 * H200.multiprocessors
PURPOSE_STEP = 0xDA942042E4DD58B5


@triton.jit
def shift_log(x):
    """(fraction, exponent) with x = (1 + fraction) * 2**exponent; x positive and normal."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0, exponent


@triton.jit
def finish_log(f, exponent):
    series = f * 0.08740852028131485 + -0.14316493272781372
    series = series * f + 0.14919838309288025
    series = series * f + -0.16569489240646362
    series = series * f + 0.19961819052696228
    series = series * f + -0.25001785159111023
    series = series * f + 0.3333395719528198
    series = series * f + -0.49999991059303284
    series = series * f + 1.0
    return exponent.to(tl.float32) * 0.693147182464599609375 + series * f


@triton.jit
def log(x):
    """exact_math.log."""
    fraction, exponent = shift_log(x)
    return finish_log(fraction, exponent)


@triton.jit
def exp_weights(x):
    """exact_math.exp_weights of x <= 0, the same bits without slow conversions.

    Adding 1.5 * 2**23 rounds to the nearest integer and shows it in the low bits; floor is one less where that went up.
    Doublings times ln 2's high part is exact, so one rounding may do for both. A mantissa is an integer as it lies.
    """
    x = tl.where(x > -40.0, x, -40.0)
    scaled = x * 1.44269502162933349609375 + 0.5
    shown = scaled + 12582912.0
    nearest = shown - 12582912.0
    went_up = nearest > scaled
    doublings = tl.where(went_up, nearest - 1.0, nearest)
    halvings = 0x4B400000 - shown.to(tl.int32, bitcast=True) + went_up.to(tl.int32)
    r = tl.fma(-doublings, 0.693359375, x)
    r = r - doublings * -2.12194440e-4
    series = r * 0.0013843538472428918 + 0.00837425421923399
    series = series * r + 0.041668009012937546
    series = series * r + 0.16666430234909058
    series = series * r + 0.4999999403953552
    series = series * r + 1.0
    series = series * r + 1.0
    bits = series.to(tl.int32, bitcast=True)  # in (0.5, 2): the exponent is 126 or 127
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    return (mantissa << 21) >> (127 - (bits >> 23) + halvings).to(tl.int64)


@triton.jit
def splitmix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def lowbias(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_key(seed, position, PURPOSE: tl.constexpr):
    """(low, high) halves, uint32, of counter_rng.row_keys. ``PURPOSE`` is (purpose + 1) * PURPOSE_STEP mod 2**64."""
    seeded = splitmix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    key = splitmix(seeded ^ (position.to(tl.uint64) * 0xD1342543DE82EF95 + PURPOSE))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def random_words(low, high, ids):
    """counter_rng.token_bits of int32 ids."""
    return lowbias(lowbias(ids.to(tl.uint32) ^ low) + high)


@triton.jit
def uniform(words):
    """counter_rng.uniform_from_bits, but for its end: 1 is not cut to the number below."""
    return ((words & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10


@triton.jit
def gumbel(words):
    """counter_rng.gumbel_noise of its random bits."""
    u = tl.minimum(uniform(words), 0.999999940395355224609375)
    fraction, exponent = shift_log(1.0 - u)
    exponential = -finish_log(tl.where(exponent == 0, -u, fraction), exponent)
    return -log(exponential)


@triton.jit
def gumbel_bound(words):
    """A number that gumbel of these words does not exceed, for a quarter of its price.

    -log(-log(1 - u)) <= -log(u), and a float's bits, read as a fixed-point number, are its log2 with straight lines in
    place of arcs: at most that. 200 units of 2**-23 are for what gumbel rounds.
    """
    return (1065353416 - uniform(words).to(tl.int32, bitcast=True)).to(tl.float32) * 8.262958294867817e-08


@triton.jit
def ordered(score):
    """Scores as int32 in the same order, -0.0 equal to 0.0, NaN above everything (candidates.pack)."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FC00000, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(rank):
    """The score of an ordered int32."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def score_of(key):
    """The score of a packed candidate."""
    return unordered((key >> 32).to(tl.int32))


@triton.jit
def inverse_temperature(temperature):
    """(factor of the logits, 1.0 or 0.0: whether the row is random)."""
    is_random = temperature >= 1e-6
    factor = tl.where(is_random, tl.div_rn(1.0, tl.maximum(temperature, 1e-6)), 1.0)
    return factor, is_random.to(tl.float32)


@triton.jit
def best_with_noise(best, best_column, reached, score, words, column, inside, is_random, is_first):
    """(best rank of each lane, its column, the best score of all) after another block, whose scores get their noise.

    ``reached``: the best score before it, of no meaning where the block ``is_first``.
    """
    worth = is_first
    if not worth:  # few blocks have a score that its noise could make the best; a NaN is always worth a look
        beaten = score + gumbel_bound(words) * is_random < reached
        worth = tl.sum((inside & (beaten == 0)).to(tl.int32), 0) > 0
    if worth:
        rank = ordered(score + gumbel(words) * is_random)
        better = (rank > best) & inside
        best = tl.where(better, rank, best)
        best_column = tl.where(better, column, best_column)
        reached = unordered(tl.max(best, 0))
    return best, best_column, reached


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _best_kernel(
    logits_ptr, keys_ptr, temperature_ptr, seed_ptr, position_ptr, logits_stride, temperature_stride, seed_stride,
    position_stride, vocab, vocab_start, per_program,
    PURPOSE: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if RANDOM:
        factor, is_random = inverse_temperature(tl.load(temperature_ptr + row * temperature_stride))
        seed = tl.load(seed_ptr + row * seed_stride).to(tl.int64)
        low, high = row_key(seed, tl.load(position_ptr + row * position_stride).to(tl.int64), PURPOSE)
    best = tl.full([BLOCK], -2147483648, tl.int32)  # below every score: lanes that saw nothing
    best_column = tl.zeros([BLOCK], tl.int32)
    reached = tl.full([], float("-inf"), tl.float32)
    first = part * per_program
    for start in range(first, tl.minimum(first + per_program, vocab), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        score = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if RANDOM:
            score = score * factor
            words = random_words(low, high, column + vocab_start)
            best, best_column, reached = best_with_noise(
                best, best_column, reached, score, words, column, inside, is_random, start == first
            )
        else:
            rank = ordered(score)
            better = (rank > best) & inside
            best = tl.where(better, rank, best)
            best_column = tl.where(better, column, best_column)
    keys = (best.to(tl.int64) << 32) | (0x7FFFFFFF - (best_column + vocab_start)).to(tl.int64)
    tl.store(keys_ptr + row * tl.num_programs(1) + part, tl.max(keys, 0))


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _conclude_kernel(
    keys_ptr, evidence_ptr, stop_ids_ptr, position_ptr, min_length_ptr, max_length_ptr, finished_ptr, token_ptr, ok_ptr,
    count_ptr, finish_ptr, keys_stride, candidates, stop_ids_stride, stop_id_stride, stop_ids, position_stride,
    min_length_stride, max_length_stride, finished_stride,
    STOP: tl.constexpr, LENGTH: tl.constexpr, ERROR: tl.constexpr, HAS_EVIDENCE: tl.constexpr, CANDIDATES: tl.constexpr,
    STOP_IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    index = tl.arange(0, CANDIDATES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    keys = tl.load(keys_ptr + row * keys_stride + index, mask=index < candidates, other=-9223372036854775808)
    key = tl.max(keys, 0)
    rank = (key >> 32).to(tl.int32)
    if HAS_EVIDENCE:
        bits = tl.load(evidence_ptr + row).to(tl.int32, bitcast=True)
    else:
        bits = rank ^ ((rank >> 31) & 0x7FFFFFFF)
    ok = (bits & 0x7F800000) != 0x7F800000
    token = tl.where(ok, 0x7FFFFFFF - (key & 0xFFFFFFFF), 0)

    position = tl.load(position_ptr + row * position_stride).to(tl.int64)
    columns = tl.arange(0, STOP_IDS)
    stop_ptr = stop_ids_ptr + row * stop_ids_stride + columns * stop_id_stride
    stops = tl.load(stop_ptr, mask=columns < stop_ids, other=-1)
    hits = tl.sum((stops == token).to(tl.int32), 0)
    is_stop = (hits > 0) & (position >= tl.load(min_length_ptr + row * min_length_stride))
    is_full = position + 1 >= tl.load(max_length_ptr + row * max_length_stride)
    live = tl.load(finished_ptr + row * finished_stride).to(tl.int32) == 0
    finish = tl.where(is_stop, STOP, tl.where(is_full, LENGTH, 0))
    finish = tl.where(live, tl.where(ok, finish, ERROR), 0)
    tl.store(token_ptr + row, token)
    tl.store(ok_ptr + row, ok)
    tl.store(count_ptr + row, (ok & live).to(tl.int32))
    tl.store(finish_ptr + row, finish)


def split_rows(rows: int, vocab: int, block: int = _BLOCK) -> tuple[int, int]:
    """(programs a row, columns a program): enough programs to fill the device, whole blocks each."""
    blocks = triton.cdiv(vocab, block)
    each = triton.cdiv(blocks, min(blocks, triton.cdiv(_PROGRAMS, rows)))
    return triton.cdiv(blocks, each), each * block


def best_candidates(
    logits_BV: Tensor, vocab_start: int, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor, *, random: bool,
    purpose: int = 0,
) -> Tensor:  # fmt: skip
    """Candidates int64 [B, P], of which the largest of a row is its best; P depends on the shape alone.

    temperature float32, seed int64, position any integer type; with ``random`` False they are not read.
    """
    rows, vocab = logits_BV.shape
    if vocab == 0:
        return torch.full((rows, 1), NO_CANDIDATE, dtype=torch.int64, device=logits_BV.device)
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    parts, per_program = split_rows(rows, vocab)
    keys_BP = torch.empty(rows, parts, dtype=torch.int64, device=logits_BV.device)
    pdl = dependent_launches(logits_BV.device)
    _best_kernel[(rows, parts)](
        logits_BV, keys_BP, temperature_B, seed_B, position_B, logits_BV.stride(0), temperature_B.stride(0),
        seed_B.stride(0), position_B.stride(0), vocab, vocab_start, per_program,
        PURPOSE=(PURPOSE_STEP * (purpose + 1)) % 2**64, RANDOM=random, BLOCK=_BLOCK, PDL=pdl, num_warps=8,
        launch_pdl=pdl,
        **EXACT,
    )  # fmt: skip
    return keys_BP


def conclude(
    keys_BP: Tensor, stop_ids_BK: Tensor, position_B: Tensor, min_length_B: Tensor, max_length_B: Tensor,
    finished_B: Tensor, *, codes: tuple[int, int, int], evidence_B: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(token int64, ok bool, count int32, finish int32), each [B]: sampler.merge_best and sampler.stop_check together.

    ``codes``: the finish codes of STOP, LENGTH and ERROR. ``evidence_B`` float32, contiguous: finite where the row's
    logits were usable; without it the best score says so. P at most 4096; finished bool or integer.
    """
    rows, candidates = keys_BP.shape
    device = keys_BP.device
    token_B = torch.empty(rows, dtype=torch.int64, device=device)
    ok_B = torch.empty(rows, dtype=torch.bool, device=device)
    count_B, finish_B = torch.empty(2, rows, dtype=torch.int32, device=device)
    pdl = dependent_launches(device)
    _conclude_kernel[(rows,)](
        keys_BP.contiguous(), token_B if evidence_B is None else evidence_B, stop_ids_BK, position_B, min_length_B,
        max_length_B, finished_B, token_B, ok_B, count_B, finish_B, candidates, candidates, stop_ids_BK.stride(0),
        stop_ids_BK.stride(1), stop_ids_BK.shape[1], position_B.stride(0), min_length_B.stride(0),
        max_length_B.stride(0), finished_B.stride(0),
        STOP=codes[0], LENGTH=codes[1], ERROR=codes[2], HAS_EVIDENCE=evidence_B is not None,
        CANDIDATES=max(_CANDIDATES, triton.next_power_of_2(candidates)),
        STOP_IDS=triton.next_power_of_2(max(1, stop_ids_BK.shape[1])), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return token_B, ok_B, count_B, finish_B
