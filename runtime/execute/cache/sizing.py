"""How many blocks of KV fit on the device, said as a sum a person can check: one line a term, one a kind of cache.

Knows: bytes. Does not know: who owns a block (runtime/schedule/blocks.py), or how caches are allocated (pool.py).
State of slots is as large as --max-num-seqs makes it; blocks take what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from models.cache_layout import CacheLayout
from models.kv_group import KvGroup
from runtime.execute.device.protocol import MemoryInfo
from runtime.schedule.config import StepLimits

_GIB = 1 << 30
_MIB = 1 << 20
SNAPSHOT_SHARE = 0.25  # of what slots leave for caches: snapshots of recurrent state, unless --num-snapshots says so
SNAPSHOTS_PER_ROW = 4  # at most


class CacheMemoryError(ValueError):
    """The caches cannot hold one request of the longest length. The text names both numbers and what to type."""


class WindowDemand(NamedTuple):
    """Blocks of layers that see a ``window``: the ``least`` there may be, for one request, and the ``most`` of use."""

    window: int
    least: int
    most: int

    @classmethod
    def of(cls, window: int, limits: StepLimits) -> Self:
        """Every slot has its window, plus a step's prefill chunks."""
        least = limits.window_blocks(window)
        return cls(window, least, limits.slots * least + -(-limits.max_prefill_tokens // limits.block_size))


@dataclass(frozen=True, slots=True)
class CacheShape:
    """This rank's share of the caches of all models that serve ``slots`` sequences, with ``snapshots`` of state.
    ``windows``: what layers with windows ask for, by ascending window."""

    layout: CacheLayout
    block_size: int
    slots: int
    snapshots: int = 0
    windows: tuple[WindowDemand, ...] = ()

    @property
    def block_bytes(self) -> int:
        """One block in all layers that attend to all tokens; 0 where no layer is paged."""
        return self.bytes_of(None)

    def bytes_of(self, window: int | None) -> int:
        """One block in all layers with that window."""
        return sum(group.page_bytes for group in self.groups if group.window == window)

    def window_bytes(self, blocks: Sequence[int]) -> int:
        """So many blocks of each window, their trash blocks included."""
        return sum((1 + n) * self.bytes_of(one.window) for one, n in zip(self.windows, blocks, strict=True))

    @property
    def groups(self) -> list[KvGroup]:
        """The paged layers; groups with equal windows have the same blocks by the same numbers."""
        return self.layout.groups(self.block_size)

    @property
    def state_bytes(self) -> int:
        """State of all slots in all layers, that of the null slot and all snapshots included."""
        return self.layout.state_bytes(self.slots + self.snapshots)

    def state_lines(self) -> list[str]:
        """One line a kind of slot state."""
        states, rows = self.layout.states, 1 + self.slots
        lines = [
            f"  - state of slots               {_size(len(layers) * rows * state.bytes_per_slot)}  "
            f"{len(layers)} layers x {rows} slots x ({state}), the null slot included"
            for state, layers in states
        ]
        if self.snapshots and states:
            each = self.layout.bytes_per_slot
            lines.append(
                f"  - snapshots of state           {_size(self.snapshots * each)}  "
                f"{self.snapshots} x {each:,} B, for prefixes"
            )
        return lines

    def block_lines(self) -> list[str]:
        """One line a group."""
        return [f"  one block                      {_size(group.page_bytes)}  {group}" for group in self.groups]


@dataclass(frozen=True, slots=True)
class CacheSizing:
    """The result, with every term of the sum. ``num_blocks`` excludes the trash block. Prints as a table.

    ``given`` says that --num-blocks decided and memory was only compared. ``tokens_needed``: what one request of the
    longest length holds, (D + 1) * W tokens reserved ahead included. ``history_bytes``: of what is in use, the tokens
    of all slots, where a proposer reads them. ``window_blocks``: of each window, without the trash block.
    """

    memory: MemoryInfo
    memory_fraction: float
    activation_peak: int
    shape: CacheShape
    max_model_len: int
    tokens_needed: int
    num_blocks: int
    given: bool
    history_bytes: int = 0
    window_blocks: tuple[int, ...] = ()

    @property
    def budget(self) -> int:
        """Bytes the fraction allows, minus what is in use and what steps and slots need; may be negative."""
        share = int(self.memory.total * self.memory_fraction)
        return share - self.memory.used - self.activation_peak - self.shape.state_bytes

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.shape.block_size

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """(W, blocks) of each window, without the trash block."""
        return tuple((one.window, n) for one, n in zip(self.shape.windows, self.window_blocks, strict=True))

    def with_blocks(self, num_blocks: int, window_blocks: tuple[int, ...] = ()) -> CacheSizing:
        """The same with the numbers of blocks all ranks agreed on. CacheMemoryError if that is too few."""
        return _checked(replace(self, window_blocks=window_blocks), num_blocks)

    def lines(self) -> list[str]:
        """The arithmetic, one term a line."""
        share = int(self.memory.total * self.memory_fraction)
        total = (self.num_blocks + 1) * self.shape.block_bytes + self.shape.window_bytes(self.window_blocks)
        how = "--num-blocks" if self.given else "memory / block, minus the trash block"
        return [
            f"  device memory                  {_size(self.memory.total)}",
            f"  x --memory-fraction {self.memory_fraction:<10.4g} {_size(share)}",
            f"  - in use now                   {_size(self.memory.used)}  this engine: weights, workspaces, libraries",
            *(
                [f"    of which token histories     {_size(self.history_bytes)}  of all slots, for proposers"]
                if self.history_bytes
                else []
            ),
            f"  - activations of one step      {_size(self.activation_peak)}  measured",
            *self.shape.state_lines(),
            f"  = left for KV                  {_size(self.budget)}",
            *self.shape.block_lines(),
            f"  blocks                         {self.num_blocks:>14,}  {how}",
            *(f"  {f'blocks of window {window}':<29}  {n:>14,}" for window, n in self.windows),
            f"  KV cache                       {_size(total)}  the trash block included",
            f"  tokens                         {self.tokens:>14,}  = {self.tokens / self.max_model_len:.1f} requests "
            f"of --max-model-len {self.max_model_len}",
        ]

    def __str__(self) -> str:
        return "\n".join(["caches", *self.lines()])


def require_share(memory: MemoryInfo, memory_fraction: float) -> None:
    """CacheMemoryError where the rest of the engine's share of the device is not free, before anything is loaded."""
    share = int(memory.total * memory_fraction)
    if share - memory.used > memory.free:
        there = memory.free + memory.used
        raise CacheMemoryError(
            f"--memory-fraction {memory_fraction:g} of the device's {_size(memory.total).strip()} is "
            f"{_size(share).strip()}, of which {_size(there).strip()} are there; other processes use the rest (see "
            f"nvidia-smi): type --memory-fraction {there * 100 // memory.total / 100:g} or less, or end them"
        )


def size_cache(
    memory: MemoryInfo,
    activation_peak: int,
    shape: CacheShape,
    *,
    max_model_len: int,
    reserve_tokens: int,
    memory_fraction: float = 0.9,
    num_blocks: int | None = None,
    history_bytes: int = 0,
) -> CacheSizing:
    """How many blocks to allocate. ``reserve_tokens`` is (D + 1) * W; ``num_blocks`` overrides the sum.

    Call it when the weights are loaded and ``Device.peak_of`` has measured a step; take the minimum over ranks with
    ``with_blocks``. CacheMemoryError when one request of ``max_model_len`` would not fit.
    """
    tokens_needed = max_model_len + reserve_tokens
    sizing = CacheSizing(
        memory,
        memory_fraction,
        activation_peak,
        shape,
        max_model_len,
        tokens_needed,
        0,
        num_blocks is not None,
        history_bytes,
    )
    sizing = replace(sizing, window_blocks=_window_blocks(sizing, num_blocks))
    return _checked(sizing, _fitting(sizing) if num_blocks is None else num_blocks)


def snapshots_that_fit(left: int, shape: CacheShape, rows: int, blocks: int) -> int:
    """How many snapshots of state to keep by default; ``shape`` has some.

    A share of the ``left`` bytes that slots leave for caches, as far as ``blocks`` and the trash block leave it:
    those that were asked for, or that one request of the longest length needs.
    """
    spare = left - (1 + blocks) * shape.block_bytes
    return max(0, min(SNAPSHOTS_PER_ROW * rows, min(int(left * SNAPSHOT_SHARE), spare) // shape.layout.bytes_per_slot))


def _window_blocks(sizing: CacheSizing, num_blocks: int | None) -> tuple[int, ...]:
    """Blocks of each window: never more than of the layers that attend to all tokens, nor than are of use.

    Windows get half of the memory at most: whatever the length of requests, at least half as many as with the best
    split fit. One request of the longest length always goes before.
    """
    shape, budget, count = sizing.shape, sizing.budget, len(sizing.shape.windows)
    if num_blocks is not None:
        return tuple(max(one.least, min(one.most, num_blocks)) for one in shape.windows)
    of_all = shape.block_bytes + sum(shape.bytes_of(one.window) for one in shape.windows)
    left = budget - (1 + _blocks_needed(sizing)) * shape.block_bytes
    found = []
    for one in shape.windows:
        each = shape.bytes_of(one.window)
        most = min(one.most, budget // of_all - 1, budget // (2 * count * each)) if shape.block_bytes else one.most
        found.append(max(one.least, min(most, left // (count * each) - 1)))
    return tuple(found)


def _fitting(sizing: CacheSizing) -> int:
    """Blocks that the budget holds, minus the trash block; where blocks take no memory, as many as slots can use."""
    shape = sizing.shape
    left = sizing.budget - shape.window_bytes(sizing.window_blocks)
    if not shape.block_bytes:
        return shape.slots * _blocks_needed(sizing) if left >= 0 else 0
    return max(0, left // shape.block_bytes - 1)


def _blocks_needed(sizing: CacheSizing) -> int:
    """By one request of the longest length."""
    return -(-sizing.tokens_needed // sizing.shape.block_size)


def _checked(sizing: CacheSizing, num_blocks: int) -> CacheSizing:
    shape, needed = sizing.shape, _blocks_needed(sizing)
    result = replace(sizing, num_blocks=num_blocks)
    if num_blocks < needed:
        held = num_blocks * shape.block_size - (sizing.tokens_needed - sizing.max_model_len)
        shorter = f"--max-model-len {held}" if held > 1 else "a smaller model or a larger device"
        if shape.state_bytes:
            shorter += ", a lower --max-num-seqs" + (" or --num-snapshots" if shape.snapshots else "")
        remedy = f"--num-blocks {needed}" if sizing.given else "a larger --memory-fraction"
        raise CacheMemoryError(
            f"one request of --max-model-len {sizing.max_model_len} needs {needed} KV blocks, there are {num_blocks}: "
            f"type {shorter}, or {remedy}\n{result}"
        )
    physical = (num_blocks + 1) * shape.block_bytes + shape.window_bytes(sizing.window_blocks)
    free = sizing.memory.free - shape.state_bytes
    if not sizing.given:  # then others have taken memory since the start
        free -= sizing.activation_peak
    if physical > free:
        raise CacheMemoryError(
            f"--num-blocks {num_blocks} needs {physical:,} bytes of KV, {free:,} are free: type "
            f"--num-blocks {max(0, free // max(1, shape.block_bytes) - 1)} or less\n{result}"
        )
    return result


def _size(count: int) -> str:
    return f"{count / _GIB:>10.2f} GiB" if abs(count) >= _GIB else f"{count / _MIB:>10.2f} MiB"
