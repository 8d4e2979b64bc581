"""The paged KV cache: how many blocks fit, said as a sum a person can check, and the tensors themselves.

Knows: bytes. Does not know: who owns a block (runtime/schedule/blocks.py), or the attention that reads it.
Block 0 is the trash block: masked rows write there and nobody reads it. It is not counted in ``num_blocks``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.inputs import empty_kv_layer
from runtime.execute.device.protocol import Device, MemoryInfo

_GIB = 1 << 30
_MIB = 1 << 20


class KvMemoryError(ValueError):
    """The cache cannot hold one request of the longest length. The text names both numbers and what to type."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """This rank's share of the cache: ``kv_heads`` are those of this rank."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        return self.layers * 2 * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x 2 x {self.block_size} tokens x {self.kv_heads} heads x {self.head_dim} x "
            f"{self.dtype.itemsize} B"
        )


@dataclass(frozen=True, slots=True)
class KvSizing:
    """The result, with every term of the sum. ``num_blocks`` excludes the trash block. Prints as a table.

    ``given`` says that --num-blocks decided and memory was only compared. ``tokens_needed``: what one request of the
    longest length holds, (D + 1) * W tokens reserved ahead included.
    """

    memory: MemoryInfo
    memory_fraction: float
    activation_peak: int
    shape: KvShape
    max_model_len: int
    tokens_needed: int
    num_blocks: int
    given: bool

    @property
    def budget(self) -> int:
        """Bytes the fraction allows, minus what is in use and what a step needs; may be negative."""
        return _budget(self.memory, self.memory_fraction, self.activation_peak)

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.shape.block_size

    def with_blocks(self, num_blocks: int) -> KvSizing:
        """The same with the number of blocks all ranks agreed on. KvMemoryError if that is too few."""
        return _checked(self, num_blocks)

    def lines(self) -> list[str]:
        """The arithmetic, one term a line."""
        used = self.memory.total - self.memory.free
        share = int(self.memory.total * self.memory_fraction)
        total = (self.num_blocks + 1) * self.shape.block_bytes
        how = "--num-blocks" if self.given else "memory / block, minus the trash block"
        return [
            f"  device memory                  {_size(self.memory.total)}",
            f"  x --memory-fraction {self.memory_fraction:<10.4g} {_size(share)}",
            f"  - in use now                   {_size(used)}  weights and whatever else is on the device",
            f"  - activations of one step      {_size(self.activation_peak)}  measured",
            f"  = left for KV                  {_size(self.budget)}",
            f"  one block                      {_size(self.shape.block_bytes)}  {self.shape}",
            f"  blocks                         {self.num_blocks:>14,}  {how}",
            f"  KV cache                       {_size(total)}  the trash block included",
            f"  tokens                         {self.tokens:>14,}  = {self.tokens / self.max_model_len:.1f} requests "
            f"of --max-model-len {self.max_model_len}",
        ]

    def __str__(self) -> str:
        return "\n".join(["KV cache", *self.lines()])


def size_kv(
    memory: MemoryInfo,
    activation_peak: int,
    shape: KvShape,
    *,
    max_model_len: int,
    reserve_tokens: int,
    memory_fraction: float = 0.9,
    num_blocks: int | None = None,
) -> KvSizing:
    """How many blocks to allocate. ``reserve_tokens`` is (D + 1) * W; ``num_blocks`` overrides the sum.

    Call it when the weights are loaded and ``Device.peak_of`` has measured a step; take the minimum over ranks with
    ``with_blocks``. KvMemoryError when one request of ``max_model_len`` would not fit.
    """
    tokens_needed = max_model_len + reserve_tokens
    sizing = KvSizing(
        memory, memory_fraction, activation_peak, shape, max_model_len, tokens_needed, 0, num_blocks is not None
    )
    fitting = max(0, _budget(memory, memory_fraction, activation_peak) // shape.block_bytes - 1)
    return _checked(sizing, fitting if num_blocks is None else num_blocks)


def _budget(memory: MemoryInfo, memory_fraction: float, activation_peak: int) -> int:
    return int(memory.total * memory_fraction) - (memory.total - memory.free) - activation_peak


def _checked(sizing: KvSizing, num_blocks: int) -> KvSizing:
    shape = sizing.shape
    needed = -(-sizing.tokens_needed // shape.block_size)
    result = KvSizing(
        sizing.memory,
        sizing.memory_fraction,
        sizing.activation_peak,
        shape,
        sizing.max_model_len,
        sizing.tokens_needed,
        num_blocks,
        sizing.given,
    )
    if num_blocks < needed:
        held = num_blocks * shape.block_size - (sizing.tokens_needed - sizing.max_model_len)
        shorter = f"--max-model-len {held}" if held > 1 else "a smaller model or a larger device"
        remedy = f"--num-blocks {needed}" if sizing.given else "a larger --memory-fraction"
        raise KvMemoryError(
            f"one request of --max-model-len {sizing.max_model_len} needs {needed} KV blocks, there are {num_blocks}: "
            f"type {shorter}, or {remedy}\n{result}"
        )
    physical = (num_blocks + 1) * shape.block_bytes
    if physical > sizing.memory.free:
        raise KvMemoryError(
            f"--num-blocks {num_blocks} needs {physical:,} bytes of KV, {sizing.memory.free:,} are free: type "
            f"--num-blocks {max(0, sizing.memory.free // shape.block_bytes - 1)} or less\n{result}"
        )
    return result


def _size(count: int) -> str:
    return f"{count / _GIB:>10.2f} GiB" if abs(count) >= _GIB else f"{count / _MIB:>10.2f} MiB"


class KvPool:
    """The cache of one rank: ``layers[i]`` [2, 1 + num_blocks, S, K, D], zeroed, allocated once."""

    def __init__(self, device: Device, shape: KvShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        layout = empty_kv_layer(
            num_blocks + 1, shape.block_size, shape.kv_heads, shape.head_dim, shape.dtype, device="meta"
        )
        self.layers: list[Tensor] = [device.zeros(*layout.shape, dtype=shape.dtype) for _ in range(shape.layers)]
