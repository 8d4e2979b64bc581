"""The Kernels protocol on NVIDIA GPUs: Triton kernels, FlashInfer attention, cuBLAS; made for Hopper (sm_90).

Knows: which kernel of rotation, attention and experts serves which shape, and the workspaces they share; norms and
products are dispatch.py's. Does not know: models, steps or graphs.

One object serves one stream: its kernels share workspaces whose safety is stream order. Everything a decode step calls
is capturable after one warm-up call of the same shape outside a capture, on a stream that waited for the current one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention, RepeatedPrefill
from models.kernels.attention import decode as attention_triton
from models.kernels.attention import decode_tma as attention_tma_triton
from models.kernels.attention import rope_decode as rope_triton
from models.kernels.attention import rope_prefill as rope_prefill_triton
from models.kernels.attention.prefill_choice import Prefill
from models.kernels.attention.query import padded_dim, power_of_two_above
from models.kernels.attention.rope_decode import Rotation
from models.kernels.experts import grouped as experts_triton
from models.kernels.experts import grouped_tma as experts_tma_triton
from models.kernels.experts import route as route_triton
from models.kernels.experts import streamed as experts_streamed_triton
from models.kernels.experts.tiles import long_list_tiles, without_lists
from models.kernels.interface import NO_SWITCHES, FlashInferSwitches, PrefillWanted
from models.kernels.matmul.choice_table import ChoiceTable
from models.kernels.matmul.dispatch import HopperProducts
from models.kernels.reference import ReferenceKernels

_ATTENTION_PROGRAMS = 132  # of a split launch: one for every multiprocessor
_MANY_PAIRS = 1024  # of row and kv head: from here on steps of an H200 drew all the watts that it may have
_SHARED_BYTES = 200 << 10  # of the 227 KiB that one program may have
_MOST_FLOAT32_ROWS = 32  # query rows of a kv head; the float32 kernel spills beyond, and the compiler takes minutes
_MOST_FEW = 255  # tokens that are rotated one by one: from 256 on an H200 was faster otherwise; fewer were not tried


class HopperKernels(HopperProducts):
    """See the module. ``choices`` overrules the shipped table of choices. ``prefill``: whose prefill attention runs.
    ``flashinfer``: what FlashInfer's environment variables say.

    Takes about 0.6 GiB of device memory for workspaces. Raises RuntimeError on a device ``unsupported`` refuses.
    """

    name = "hopper"

    def __init__(
        self,
        device: torch.device | str,
        *,
        choices: ChoiceTable | None = None,
        prefill: PrefillWanted = "auto",
        flashinfer: FlashInferSwitches = NO_SWITCHES,
    ) -> None:
        device = torch.device(device)
        reason = unsupported(device)
        if reason is not None:
            raise RuntimeError(f"HopperKernels cannot run on {device}: {reason}")
        super().__init__(device, choices)
        self._hopper = torch.cuda.get_device_capability(device)[0] == 9  # others have less shared memory, or other TMA
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._reference = ReferenceKernels()
        self._prefill = Prefill(device, prefill, flashinfer, pdl=self.pdl)
        self._attention_partial = torch.empty_like(self._partial)
        self._attention_counters = torch.zeros(_ATTENTION_PROGRAMS, dtype=torch.int32, device=device)

    # -- experts ------------------------------------------------------------------------------------------------------

    def route_top_k(
        self,
        logits_TE: Tensor,
        choices: int,
        renormalise: bool,
        local_E: Tensor,
        real_T: Tensor,
        load_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return route_triton.route_top_k(logits_TE, choices, renormalise, local_E, real_T, load_E, self.pdl)

    def expert_mlp(
        self,
        x_TN: Tensor,
        gate_up_G2IN: Tensor,
        down_GNI: Tensor,
        weights_TC: Tensor,
        local_TC: Tensor,
        *,
        all_experts: int,
    ) -> Tensor:
        if not experts_triton.supports(gate_up_G2IN, down_GNI):
            return self._reference.expert_mlp(
                x_TN, gate_up_G2IN, down_GNI, weights_TC, local_TC, all_experts=all_experts
            )
        tokens, choices = local_TC.shape
        if without_lists(tokens, choices, all_experts):
            return experts_streamed_triton.expert_mlp(x_TN, gate_up_G2IN, down_GNI, weights_TC, local_TC, self.pdl)
        if self._hopper and experts_tma_triton.supports(gate_up_G2IN, down_GNI):
            mean, (experts, hidden, inner) = tokens * choices / all_experts, down_GNI.shape
            tiles = long_list_tiles(mean, experts, hidden, inner, self._multiprocessors)
            if tiles is not None:
                return experts_tma_triton.expert_mlp(
                    x_TN, gate_up_G2IN, down_GNI, weights_TC, local_TC, self.pdl, tiles
                )
        return experts_triton.expert_mlp(
            x_TN, gate_up_G2IN, down_GNI, weights_TC, local_TC, self.pdl, all_experts=all_experts
        )

    # -- attention ----------------------------------------------------------------------------------------------------

    def rope_and_cache(
        self,
        qkv_TX: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        eps: float,
        cos_sin_LR: Tensor,
        positions_T: Tensor,
        kv_slots_T: Tensor,
        kv_layer: Tensor,
    ) -> Tensor:
        if (q_norm_D is None) != (k_norm_D is None):  # no architecture has this; the kernel norms both or neither
            return self._reference.rope_and_cache(
                qkv_TX,
                heads,
                kv_heads,
                head_dim,
                q_norm_D,
                k_norm_D,
                eps,
                cos_sin_LR,
                positions_T,
                kv_slots_T,
                kv_layer,
            )
        rotation = Rotation(q_norm_D, k_norm_D, eps, cos_sin_LR, positions_T, kv_slots_T)
        many = qkv_TX.shape[0] > _MOST_FEW and rope_prefill_triton.supports(head_dim, cos_sin_LR.shape[1])
        form = rope_prefill_triton.rope_and_cache if many else rope_triton.token_by_token
        return form(qkv_TX, heads, kv_layer, rotation, self.pdl)

    def decode_attention(self, q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float) -> Tensor:
        heads, kv_heads = q_THD.shape[1], kv_layer.shape[3]
        if q_THD.dtype == torch.float32 and heads // kv_heads * inputs.query_len > _MOST_FLOAT32_ROWS:
            return self._reference.decode_attention(q_THD, kv_layer, inputs, scale)
        return self._triton_attention(q_THD, heads, kv_layer, inputs, scale, None)

    def rope_cache_attend(
        self,
        qkv_TX: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        eps: float,
        cos_sin_LR: Tensor,
        positions_T: Tensor,
        kv_slots_T: Tensor,
        kv_layer: Tensor,
        inputs: DecodeAttention,
        scale: float,
    ) -> Tensor:
        both_or_neither = (q_norm_D is None) == (k_norm_D is None)
        float32_fits = qkv_TX.dtype != torch.float32 or heads // kv_heads <= _MOST_FLOAT32_ROWS
        if inputs.query_len == 1 and both_or_neither and float32_fits:
            rotation = Rotation(q_norm_D, k_norm_D, eps, cos_sin_LR, positions_T, kv_slots_T)
            return self._triton_attention(qkv_TX, heads, kv_layer, inputs, scale, rotation)
        q_THD = self.rope_and_cache(
            qkv_TX, heads, kv_heads, head_dim, q_norm_D, k_norm_D, eps, cos_sin_LR, positions_T, kv_slots_T, kv_layer
        )
        return self.decode_attention(q_THD, kv_layer, inputs, scale)

    def prepare_prefill(self, dtype: torch.dtype, head_dim: int) -> None:
        """Begin in the background what prefill of these needs, long before ``settle``."""
        self._prefill.prepare(dtype, head_dim)

    def settle(self, agree_min: Callable[[int], int]) -> None:
        self._prefill.settle(agree_min)

    @property
    def prefill_name(self) -> str:
        return self._prefill.name

    def plan_prefill(
        self, inputs: PrefillAttention, heads: int, kv_heads: int, head_dim: int, kv_layer: Tensor
    ) -> PrefillAttention:
        if not self._prefill.supports(head_dim):
            return inputs
        return self._prefill.plan(inputs, heads, kv_heads, head_dim, kv_layer)

    def repeat_prefill(
        self, page_table_BP: Tensor, max_tokens: int, heads: int, kv_heads: int, kv_layer: Tensor
    ) -> RepeatedPrefill | None:
        if not self._prefill.supports(kv_layer.shape[-1]):
            return None
        return self._prefill.repeated(page_table_BP, max_tokens, heads, kv_heads, kv_layer)

    def prefill_attention(self, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float) -> Tensor:
        if inputs.planned is None:
            return self._reference.prefill_attention(q_THD, kv_layer, inputs, scale)
        return self._prefill.run(q_THD, kv_layer, inputs, scale)

    def _triton_attention(
        self,
        q_TX: Tensor,
        heads: int,
        kv_layer: Tensor,
        inputs: DecodeAttention,
        scale: float,
        rotation: Rotation | None,
    ) -> Tensor:
        rows, (_, _, _, kv_heads, head_dim) = inputs.kv_lengths_B.shape[0], kv_layer.shape
        query_rows = heads // kv_heads * inputs.query_len
        row_bytes = padded_dim(head_dim) * kv_layer.element_size()
        if self.pdl and rows * kv_heads >= _MANY_PAIRS:  # TMA and dependent launches came with the same GPUs
            block_n, stages, warps = _many_blocks(query_rows)
            if attention_tma_triton.supports(q_TX, heads, kv_layer, inputs, block_n):
                return attention_tma_triton.attend_many(
                    q_TX,
                    heads,
                    kv_layer,
                    inputs,
                    scale,
                    rotation=rotation,
                    block_n=block_n,
                    stages=stages,
                    warps=warps,
                    pdl=self.pdl,
                )
        block_n, stages, warps = _attention_blocks(rows * kv_heads, power_of_two_above(query_rows), row_bytes)
        if q_TX.dtype == torch.float32:  # not for tensor cores: products that keep their operands in registers
            block_n, stages, warps = min(block_n, 32), 3, 8
        splits = attention_triton.choose_splits(rows, kv_heads, inputs.max_kv_length, block_n, _ATTENTION_PROGRAMS)
        room = self._attention_partial.numel()
        while attention_triton.workspace_floats(rows, kv_heads, query_rows, head_dim, splits) > room:
            splits //= 2
        return attention_triton.decode_attention(
            q_TX,
            heads,
            kv_layer,
            inputs,
            scale,
            self._attention_partial,
            self._attention_counters,
            rotation=rotation,
            block_n=block_n,
            splits=splits,
            stages=stages,
            warps=warps,
            pdl=self.pdl,
        )


def _many_blocks(query_rows: int) -> tuple[int, int, int]:
    """(keys a block, stages, warps) of decode_tma.py: what gave an H200 the shortest layers."""
    return 32, 3, 1 if query_rows <= 8 else 2


def _attention_blocks(pairs: int, query_rows: int, row_bytes: int) -> tuple[int, int, int]:
    """(keys a block, stages, warps): what was fastest on an H200 for this many (row, kv head) pairs, made to fit."""
    block_n, stages, warps = 64, 5, 4
    if pairs >= 1024:
        stages, warps = 3, 2
    elif pairs >= 256:
        block_n, warps = 32, 2
    if query_rows >= 64:
        warps = max(4, query_rows // 16)  # fewer would keep a part of so tall a tile in memory
    while block_n > 16 and _attention_shared(block_n, stages, query_rows, row_bytes) > _SHARED_BYTES:
        block_n //= 2
    return block_n, stages, warps


def _attention_shared(block_n: int, stages: int, query_rows: int, row_bytes: int) -> int:
    """Bytes of shared memory of a program, nearly; what Triton 3.6 makes has up to 6 KiB more.

    Keys and values of a block are held (stages - 1) / 2 times over, beside about three tiles of query rows.
    """
    return row_bytes * (block_n * (stages - 1) + 3 * query_rows)


def unsupported(device: torch.device) -> str | None:
    """Why HopperKernels cannot run on ``device``, with what to do about it; None where it can."""
    if device.type != "cuda":
        return f"it is a {device.type} device; these kernels need an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return (
            f"its compute capability is {major}.{minor}; the Triton kernels need bfloat16 tensor cores (8.0 or later)"
        )
    return None
