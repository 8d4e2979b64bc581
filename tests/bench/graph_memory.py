"""What the captured steps of a model hold of a GPU's memory, worked out on a machine without one.

    python3 -m tests.bench.graph_memory [--model 8b]      # a table of graphs, and what holds the largest one's peak

Steps run over torch's meta device (tests/models/kernels/rank_without_gpu.py), so each tensor lives exactly as long as
in an engine. Their sizes go through a model of torch's caching allocator, in the order in which graphs are captured:
what all graphs share is the sum of its segments.

Knows: which steps are captured and in what order, how the allocator cuts segments. Does not know: workspaces that are
made outside of graphs, the driver's own memory for graphs, experts or several ranks.
"""

from __future__ import annotations

import argparse
import bisect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from models.inputs import PrefillAttention
from models.row_buckets import token_ladder
from runtime.execute.launch_spec import MOST_SPLIT_TOKENS
from runtime.execute.staging import Chunks
from tests.dispatch_mode import DispatchMode
from tests.models.kernels.compiling_driver import CompilingDriver
from tests.models.kernels.rank_without_gpu import BUCKETS, GREEDY, META, MOST_PREFILL, Rank, play_an_h200

MIB = 1 << 20
Event = tuple[int, int]  # (a storage's number, its bytes, or 0: it is freed)


class Allocations(DispatchMode):
    """While entered: every storage that operations make, until its last tensor is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.made_by: dict[int, str] = {}
        self._tensors: dict[int, int] = {}  # of each live storage
        self._number: dict[int, int] = {}  # of its address
        self._known: set[int] = set()  # storages from before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and _address(tensor) not in self._number:
                self._known.add(_address(tensor))
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._meet(tensor, str(func))
        return found

    def _meet(self, tensor: Tensor, name: str) -> None:
        address = _address(tensor)
        if address in self._known and address not in self._number:
            return
        if address not in self._number:
            number = self._number[address] = len(self.made_by)
            self.made_by[number] = f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            self._tensors[number] = 0
            self.events.append((number, max(1, tensor.untyped_storage().nbytes())))
        number = self._number[address]
        self._tensors[number] += 1
        weakref.finalize(tensor, self._leave, number, address)

    def _leave(self, number: int, address: int) -> None:
        self._tensors[number] -= 1
        if self._tensors[number] == 0:
            self.events.append((number, 0))
            del self._number[address]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def allocations(work: Callable[[], object]) -> Allocations:
    """What ``work`` allocates and frees."""
    found = Allocations()
    with torch.no_grad(), found:
        work()
    return found


def peak(found: Allocations) -> tuple[int, list[tuple[int, str]]]:
    """The most bytes that live at once, and what they are, the largest first."""
    live: dict[int, int] = {}
    total = most = 0
    holders: list[tuple[int, str]] = []
    for number, size in found.events:
        total += size or -live.pop(number)
        if size:
            live[number] = size
        if total > most:
            most, holders = total, sorted(((size, found.made_by[one]) for one, size in live.items()), reverse=True)
    return most, holders


@dataclass
class Pool:
    """Torch's caching allocator for one pool and one stream, without expandable segments (CUDACachingAllocator.cpp).

    Sizes are rounded to 512 bytes. Up to 1 MiB they come out of segments of 2 MiB, up to 10 MiB out of segments of 20,
    others out of segments of their own, rounded to 2 MiB. The smallest free block that fits is taken, and split where
    512 bytes are left of a small one, more than 1 MiB of a large one. Freed neighbours are merged.
    """

    segments: list[int] = field(default_factory=list)
    _blocks: list[dict[int, tuple[int, int | None]]] = field(default_factory=list)  # start: (size, whose)
    _at: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.segments)

    def replay(self, events: list[Event]) -> None:
        """One capture: what it holds at its end is freed, as nobody keeps a tensor of it."""
        for number, size in events:
            if size:
                self._take(number, -(-size // 512) * 512)
            else:
                self._free(number)
        for number in list(self._at):
            self._free(number)

    def _take(self, number: int, size: int) -> None:
        small = size <= MIB
        fitting = [
            (block, segment, start)
            for segment, blocks in enumerate(self._blocks)
            if (self.segments[segment] == 2 * MIB) == small
            for start, (block, owner) in blocks.items()
            if owner is None and block >= size
        ]
        if not fitting:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append(whole)
            self._blocks.append({0: (whole, None)})
            fitting = [(whole, len(self.segments) - 1, 0)]
        block, segment, start = min(fitting)
        blocks = self._blocks[segment]
        if block - size > (511 if small else MIB):
            blocks[start + size] = (block - size, None)
            block = size
        blocks[start] = (block, number)
        self._at[number] = segment, start

    def _free(self, number: int) -> None:
        segment, start = self._at.pop(number)
        blocks = self._blocks[segment]
        blocks[start] = (blocks[start][0], None)
        starts = sorted(blocks)
        here = bisect.bisect_left(starts, start)
        for left in (here, here - 1):  # first with the one behind it, then with the one before
            if 0 <= left < len(starts) - 1:
                one, other = starts[left], starts[left + 1]
                if blocks[one][1] is None and other in blocks and blocks[other][1] is None:
                    blocks[one] = (blocks[one][0] + blocks.pop(other)[0], None)


class Steps:
    """A rank's steps as an engine captures them, in its order: chunks, chunks with split keys, tails, decode."""

    def __init__(self, model: str, layers: int = 4, tokens: int = MOST_PREFILL) -> None:
        play_an_h200()
        self._rank = Rank(CompilingDriver(compile=False).activate(), model, layers=layers)
        self._most = tokens
        self._prefill = self._rank._prefill
        self._page_table = torch.zeros(
            BUCKETS[-1], self._prefill._parts.tables.max_blocks, dtype=torch.int32, device=META
        )
        self._planned = self._prefill.attention_for_graphs(self._page_table, tokens)
        size = self._rank.model.config.hidden_size
        self._hidden = torch.zeros(BUCKETS[-1], size, dtype=self._rank.model.dtype, device=META)

    def all(self, fewest: int = 1) -> Iterator[tuple[str, Allocations]]:
        """(name, what its capture allocates) of every graph, but for those of chunks of less than ``fewest`` tokens."""
        ladder = [tokens for tokens in token_ladder(self._most) if tokens >= fewest]
        for tokens in reversed(ladder):
            yield f"{tokens} tokens", self.forward(tokens)
        for tokens in reversed([tokens for tokens in ladder if tokens <= MOST_SPLIT_TOKENS]):
            yield f"{tokens} tokens, split keys", self.forward(tokens, split_keys=True)
        for rows in reversed(BUCKETS):
            emitting = torch.zeros(rows, dtype=torch.int64, device=META)
            hidden = self._hidden[:rows]
            yield f"tail of {rows} rows", allocations(partial(self._prefill.finish, hidden, None, emitting, GREEDY))
        for rows in reversed(BUCKETS):
            yield f"decode of {rows} rows", allocations(partial(self._rank.decode, rows))

    def forward(self, tokens: int, *, split_keys: bool = False) -> Allocations:
        """Of the forward graph of so many tokens."""
        ints = torch.zeros(7, tokens, dtype=torch.int64, device=META)
        rows = min(tokens, BUCKETS[-1])
        chunks = Chunks(*ints[:3], *ints[3:, :rows])
        attention = PrefillAttention(self._page_table, (tokens,), (tokens,), self._planned)
        return allocations(
            lambda: self._prefill.hidden(chunks, attention, mixed=True, split_keys=split_keys, captured=True)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", help="a shape of models/shapes: qwen3-MODEL")
    parser.add_argument("--tokens", type=int, default=MOST_PREFILL, help="of the largest step with chunks")
    parser.add_argument("--fewest", type=int, default=1, help="of the smallest one")
    given = parser.parse_args()
    pool, largest = Pool(), ""
    for name, found in Steps(given.model, tokens=given.tokens).all(given.fewest):
        before, (most, holders) = pool.bytes, peak(found)
        pool.replay(found.events)
        if pool.bytes > before:
            print(f"{name:24} {most / MIB:8.1f} MiB live at most, all graphs share {pool.bytes / MIB:8.1f} MiB")
        if name == f"{given.tokens} tokens":
            largest = "\n".join(f"{size / MIB:10.1f} {what}" for size, what in holders if size >= MIB)
    print(f"at the peak of {given.tokens} tokens, MiB:\n{largest}")


if __name__ == "__main__":
    main()
