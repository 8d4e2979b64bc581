"""Rows of attention on NVIDIA GPUs: rotation and cache write, decode and windows, prompts.

Knows: which kernel takes which call, and its launch. Does not know: what is fastest (decode_choice.py,
prefill_choice.py). ``ops`` has ``pdl``, ``traits``, ``decode_choice``, ``prefill`` (a Prefill) and
workspaces: ``attention_sums`` float32 of partial results, and ``attention_counters``.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.inputs import PIECE, DecodeAttention, PrefillAttention
from models.kernels.attention import (
    decode,
    decode_choice,
    decode_list,
    decode_window,
    decode_work,
    invariant,
    rope_decode,
    rope_prefill,
)
from models.kernels.attention.decode_choice import (
    DecodeChoice,
    WindowLaunch,
    longest_window,
    programs_each,
    programs_of,
    window_programs,
)
from models.kernels.attention.decode_work import DecodeWork, SplitRule
from models.kernels.attention.prefill_tiles import RepeatedTiles, Tiles
from models.kernels.interface import PLAIN, AttentionKind, Rotation
from models.kernels.matmul import codes
from models.ops.rows_nvidia.dense import with_pdl
from models.ops.rows_reference import attention as in_torch
from models.ops.table import INVARIANT, Key, Row, Run, plain, takes_every
from parallel.comm.quantised import Activations, Quantised

MOST_FLOAT32_ROWS = 32  # query rows of a kv head; above, the float32 kernel spills and takes minutes to compile
_MOST_FEW = 255  # tokens for rope_decode.py; from 256 rope_prefill.py was faster on an H200, fewer were not tried
_PROGRAMS_A_MULTIPROCESSOR = 4  # of prefill attention of the deterministic mode
_SAME_BITS = frozenset((INVARIANT,))


# ---- rotation and cache write ----


class RopeCall(NamedTuple):
    """``even``: norms of queries and keys both, or none; no known architecture norms only one of them."""

    many: bool
    even: bool
    head_dim: int
    rotary: int


def _rope_call(qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation) -> RopeCall:
    sizes = kv_layer.shape[4], rotation.cos_sin_LR.shape[1]
    return RopeCall(qkv_TX.shape[0] > _MOST_FEW, _even(rotation), *sizes)


def _even(rotation: Rotation) -> bool:
    return (rotation.q_norm_D is None) == (rotation.k_norm_D is None)


def _uneven(ops: Any, call: RopeCall) -> str | None:
    return None if call.even else "a norm of only queries or only keys"


def _few(ops: Any, call: RopeCall) -> str | None:
    if not call.many or not rope_prefill.supports(call.head_dim, call.rotary):
        return "few tokens, or heads that are no power of two"
    return _uneven(ops, call)


def _rope_same_bits(ops: Any, call: RopeCall) -> Run:
    """By one kernel for any number of tokens; which one is up to the shape of a head."""
    if rope_prefill.supports(call.head_dim, call.rotary):
        return partial(rope_prefill.rope_and_cache, pdl=ops.pdl)
    return partial(rope_decode.rope_and_cache, pdl=ops.pdl, heads_a_program=8)


# ---- decode and windows ----


class AttendCall(NamedTuple):
    """Arguments of "attend", an op of this device alone; ``q``: rotated queries, or qkv with a ``rotation``."""

    q_TX: Tensor
    heads: int
    kv_layer: Tensor
    inputs: DecodeAttention
    scale: float
    rotation: Rotation | None
    out_THD: Activations | None
    kind: AttentionKind = PLAIN

    @property
    def step(self) -> tuple[DecodeAttention, int, Tensor]:
        return _bounded(self.inputs, self.kind), self.heads, self.kv_layer

    @property
    def query_rows(self) -> int:
        return self.heads // self.kv_layer.shape[3] * self.inputs.query_len


def _step_key(inputs: DecodeAttention, heads: int, kv_layer: Tensor, kind: AttentionKind = PLAIN) -> tuple[object, ...]:
    return (
        inputs.kv_lengths_B.shape[0],
        inputs.query_len,
        inputs.max_kv_length,
        inputs.skip_empty,
        inputs.tree_BQ is None,
        inputs.starts_B is None,
        heads,
        *kv_layer.shape[2:],
        kv_layer.dtype,
        *kind.key,
    )


def _attend_key(
    q_TX: Tensor, heads: int, kv_layer: Tensor, inputs: DecodeAttention, scale: float, rotation: Rotation | None,
    out_THD: Activations | None, kind: AttentionKind = PLAIN,
) -> tuple[object, ...]:  # fmt: skip
    work = inputs.work
    rule = (work.rule, True) if isinstance(work, DecodeWork) else (work, False)
    return *_step_key(inputs, heads, kv_layer, kind), *rule, rotation is None, type(out_THD)


def _bounded(inputs: DecodeAttention, kind: AttentionKind) -> DecodeAttention:
    """With the most keys that a row has in the window, from the beginning of a block on."""
    if kind.window is None:
        return inputs
    most = kind.window + inputs.query_len + decode_choice.MOST_BLOCK - 2
    return dataclasses.replace(inputs, max_kv_length=min(inputs.max_kv_length, most))


def _choice(ops: Any, kind: AttentionKind, inputs: DecodeAttention) -> DecodeChoice:
    """Without TMA for soft caps, and for several tokens a row with a window or sinks."""
    found: DecodeChoice = ops.decode_choice
    fits = kind.plain or (kind.softcap is None and inputs.query_len == 1)
    return found if fits else dataclasses.replace(found, pdl=False)


def _plan(ops: Any, call: tuple[Any, ...]) -> Run:
    inputs, heads, kv_layer, kind = (*call, PLAIN)[:4]
    step, pdl, window = (_bounded(inputs, kind), heads, kv_layer), ops.pdl, kind.window
    choice = _choice(ops, kind, inputs)
    rule = choice.rule(*step)
    if choice.without_list(*step):
        return lambda inputs, *_: dataclasses.replace(inputs, work=rule)
    return lambda inputs, *_: dataclasses.replace(inputs, work=decode_work.plan_decode(inputs, rule, pdl, window))


def _fits(ops: Any, call: AttendCall, rule: SplitRule) -> bool:
    *_, kv_heads, head_dim = call.kv_layer.shape
    choice = _choice(ops, call.kind, call.inputs)
    return choice.fits(rule, len(call.inputs.kv_lengths_B), kv_heads, call.query_rows, head_dim)


def _list_of(ops: Any, call: AttendCall) -> SplitRule | None:
    """The rule of the call's list, where there is one and its partial results fit."""
    work = call.inputs.work
    return work.rule if isinstance(work, DecodeWork) and _fits(ops, call, work.rule) else None


def _window_of(ops: Any, call: AttendCall) -> WindowLaunch | None:
    return _choice(ops, call.kind, call.inputs).window(*call.step) if call.rotation is None else None


def _tall(call: AttendCall) -> str | None:
    if call.kv_layer.dtype != torch.float32 or call.query_rows <= MOST_FLOAT32_ROWS:
        return None
    reason = f"in float32 {call.query_rows} query rows of a key head are more than {MOST_FLOAT32_ROWS}"
    return f"{reason}: --dtype bfloat16 has more"


def _narrow(call: AttendCall) -> str | None:
    if call.inputs.tree_BQ is None or call.inputs.query_len <= (call.kind.window or call.inputs.query_len):
        return None
    return f"a tree of {call.inputs.query_len} nodes is wider than a sliding window of {call.kind.window}"


def _no_window(ops: Any, call: AttendCall) -> str | None:
    window = _window_of(ops, call)
    if not call.kind.plain:
        return "decode_window.py takes no sliding window, soft cap or sinks"
    return _tall(call) or (None if _list_of(ops, call) and window and window.tma else "no window over a list")


def _windows(ops: Any, call: AttendCall) -> Run:
    window, kv_heads = _window_of(ops, call), call.kv_layer.shape[3]
    assert window is not None
    programs = window_programs(window.programs, kv_heads, ops.traits.multiprocessors)
    launch = {"stages": window.stages, "warps": window.warps, "programs": programs, "pdl": ops.pdl}
    memory = ops.attention_sums, ops.attention_counters
    return lambda q_THD, heads, kv_layer, inputs, scale, rotation, out_THD, kind=PLAIN: decode_window.attend_windows(
        q_THD, kv_layer, inputs, inputs.work, scale, *memory, out_THD=out_THD, **launch
    )


def _no_list(ops: Any, call: AttendCall) -> str | None:
    return _tall(call) or _narrow(call) or (None if _list_of(ops, call) is not None else "no list of splits")


def _list(ops: Any, call: AttendCall) -> Run:
    choice, rule = _choice(ops, call.kind, call.inputs), _list_of(ops, call)
    by_tma, (block_n, stages, warps) = choice.variant(*call.step)
    assert rule is not None
    kv_heads, multiprocessors, window = call.kv_layer.shape[3], ops.traits.multiprocessors, _window_of(ops, call)
    if window is not None:
        programs = window_programs(window.programs, kv_heads, multiprocessors)
    else:
        each = programs_each(call.inputs, kv_heads, by_tma)
        programs = programs_of(call.inputs, kv_heads, rule, multiprocessors, each)
    block_n = min(block_n, rule.block)
    launch = {"tma": by_tma, "block_n": block_n, "stages": stages, "warps": warps, "programs": programs, "pdl": ops.pdl}
    attend: Run = partial(decode_list.attend_list, **launch)
    memory = ops.attention_sums, ops.attention_counters
    return lambda q_TX, heads, kv_layer, inputs, scale, rotation, out_THD, kind=PLAIN: attend(
        q_TX, heads, kv_layer, inputs, inputs.work, scale, *memory, rotation=rotation, out_THD=out_THD, kind=kind
    )


def _ragged(ops: Any, call: AttendCall) -> str | None:
    ragged = None if call.inputs.starts_B is None else "chunks without a list of splits that fits"
    return _tall(call) or _narrow(call) or ragged


def _splits(ops: Any, call: AttendCall) -> Run:
    choice, work = _choice(ops, call.kind, call.inputs), call.inputs.work
    rule = work if isinstance(work, SplitRule) and _fits(ops, call, work) else choice.rule(*call.step)
    _, (_, stages, warps) = choice.variant(*call.step, listed=False)
    *_, kv_heads, head_dim = call.kv_layer.shape
    apart = choice.merges_apart(len(call.inputs.kv_lengths_B) * kv_heads, call.query_rows, head_dim)
    launch = {"stages": stages, "warps": warps, "apart": apart, "pdl": ops.pdl}
    memory = ops.attention_sums, ops.attention_counters
    return lambda q_TX, heads, kv_layer, inputs, scale, rotation, out_THD, kind=PLAIN: decode.decode_attention(
        q_TX, heads, kv_layer, inputs, rule, scale, *memory, rotation=rotation, out_THD=out_THD, kind=kind, **launch
    )


def _attend_in_torch(ops: Any) -> Run:
    return lambda q_THD, heads, kv_layer, inputs, scale, rotation, out_THD, kind=PLAIN: in_torch.decode_attention(
        q_THD, kv_layer, inputs, scale, out_THD, kind=kind
    )


def _attend(
    ops: Any, kv_layer: Tensor, heads: int, out_THD: Tensor | None, into: Quantised | None, kind: AttentionKind,
    q_TX: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    """``rest``: inputs, scale, rotation. Kernels quantise where a head is a group."""
    if into is None:
        numbers_THD: Tensor = ops.attend(q_TX, heads, kv_layer, *rest, out_THD, kind)
        return numbers_THD
    here = into.group == kv_layer.shape[4] and q_TX.dtype == torch.bfloat16
    out: Tensor = ops.attend(q_TX, heads, kv_layer, *rest, into if here else None, kind)
    return out if here else codes.quantise(out.flatten(1), into.group, ops.pdl, into).codes


def _decode(ops: Any) -> Run:
    return lambda q_THD, kv_layer, inputs, scale, out_THD=None, *, into=None, kind=PLAIN: _attend(
        ops, kv_layer, q_THD.shape[1], out_THD, into, kind, q_THD, inputs, scale, None
    )


def _rotating(ops: Any, call: tuple[bool, bool, bool]) -> Run:
    return lambda qkv_TX, heads, kv_layer, rotation, inputs, scale, into=None, kind=PLAIN: _attend(
        ops, kv_layer, heads, None, into, kind, qkv_TX, inputs, scale, rotation
    )


def _rotating_call(
    qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation, inputs: DecodeAttention, scale: float,
    into: Quantised | None = None, kind: AttentionKind = PLAIN,
) -> tuple[bool, bool, bool]:  # fmt: skip
    fits = qkv_TX.dtype != torch.float32 or heads // kv_layer.shape[3] <= MOST_FLOAT32_ROWS
    return inputs.query_len == 1, _even(rotation) and not rotation.value_norm, fits


def _splits_chunks(ops: Any) -> Run:
    few = MOST_FLOAT32_ROWS // PIECE  # query heads of a key head
    return lambda heads, kv_layer: kv_layer.dtype != torch.float32 or heads // kv_layer.shape[3] <= few


def _decode_same_bits(ops: Any) -> Run:
    memory = ops.attention_sums, ops.attention_counters
    launch = {"multiprocessors": ops.traits.multiprocessors, "pdl": ops.pdl}
    return lambda q_THD, kv_layer, inputs, scale, out_THD=None, *, into=None, kind=PLAIN: invariant.decode_attention(
        q_THD, _with_a_kernel(kv_layer), inputs, scale, *memory, out_THD=out_THD, kind=kind, **launch
    )


# ---- prompts ----


def _prefill(ops: Any) -> Run:
    def prefill_attention(
        q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float, kind: AttentionKind = PLAIN
    ) -> Tensor:
        if inputs.planned is None:  # neither of the two takes such heads
            return in_torch.prefill_attention(q_THD, kv_layer, inputs, scale, kind)
        out_THD: Tensor = ops.prefill.run(q_THD, kv_layer, inputs, scale, kind)
        return out_THD

    return prefill_attention


def _plan_same_bits(inputs: PrefillAttention, heads: int, kv_layer: Tensor) -> PrefillAttention:
    return dataclasses.replace(inputs, planned=invariant.listed_tiles(inputs, heads, _with_a_kernel(kv_layer)))


def _repeat_same_bits(ops: Any) -> Run:
    return lambda page_table_BP, max_tokens, heads, kv_layer: RepeatedTiles(
        ops.device, len(page_table_BP), max_tokens, invariant.tokens_of_a_tile(heads, _with_a_kernel(kv_layer))
    )


def _prefill_same_bits(ops: Any) -> Run:
    programs, pdl = _PROGRAMS_A_MULTIPROCESSOR * ops.traits.multiprocessors, ops.pdl

    def prefill_attention(
        q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float, kind: AttentionKind = PLAIN
    ) -> Tensor:
        if not isinstance(inputs.planned, Tiles | RepeatedTiles):
            raise TypeError("prefill attention is planned first (plan_prefill, repeat_prefill)")
        return invariant.prefill_attention(
            q_THD, kv_layer, inputs.page_table_BP, inputs.planned, scale, programs=programs, pdl=pdl, kind=kind
        )

    return prefill_attention


def _with_a_kernel(kv_layer: Tensor) -> Tensor:
    """``kv_layer``. Raises RuntimeError for heads that no kernel of the deterministic mode takes."""
    if not invariant.supports(kv_layer.shape[-1]):
        raise RuntimeError(
            f"attention with heads of {kv_layer.shape[-1]} dims has no batch-invariant kernel (512 at most)"
        )
    return kv_layer


ROWS = (
    Row("rope_and_cache", with_pdl(rope_prefill.rope_and_cache), refuses=_few),
    Row("rope_and_cache", with_pdl(rope_decode.rope_and_cache), refuses=_uneven),
    Row("plan_decode", _plan, refuses=takes_every),
    Row("attend", _windows, refuses=_no_window),
    Row("attend", _list, refuses=_no_list),
    Row("attend", _splits, refuses=_ragged),
    Row("attend", _attend_in_torch, fallback="torch_attention"),
    Row("decode_attention", _decode),
    Row("rope_cache_attend", _rotating, refuses=lambda ops, call: None if all(call) else "norm and rotate apart"),
    Row("splits_chunks", _splits_chunks),
    plain("longest_window", longest_window),
    Row("prefill_wave", lambda ops: ops.prefill.wave),
    Row("plan_prefill", lambda ops: ops.prefill.plan),
    Row("repeat_prefill", lambda ops: ops.prefill.repeated),
    Row("prefill_attention", _prefill),
)
INVARIANT_ROWS = (
    Row("rope_and_cache", _rope_same_bits, _SAME_BITS, refuses=_uneven),
    Row("decode_attention", _decode_same_bits, _SAME_BITS),
    plain("plan_prefill", _plan_same_bits, INVARIANT),
    Row("repeat_prefill", _repeat_same_bits, _SAME_BITS),
    Row("prefill_attention", _prefill_same_bits, _SAME_BITS),
)
KEYS = {
    "rope_and_cache": Key(_rope_call),
    "plan_decode": Key(_step_key, lambda *call: call),
    "attend": Key(_attend_key, AttendCall),
    "rope_cache_attend": Key(_rotating_call),
}
