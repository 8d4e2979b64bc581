"""The block pool: physical KV blocks, reference counts, and the prefix index.

Knows: references, fences, and which published blocks hold which tokens: the prefix index is keyed by exact contents.
Does not know: when a block may be published (sharing.py), requests, slots, or tensors.
Block 0 is the trash block and never leaves this file's hands.

    taken ----------> owned (refs >= 1) --retire_after(step)--> fenced --step lands--> free
      ^                 |  publish(): findable by contents                              |
      |                 v                                                               |
      +---- cached (refs 0, still findable; reused oldest first) <----------------------+
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from runtime.schedule.fence import Fence
from runtime.schedule.request import packed
from runtime.schedule.slots import AccountingError
from runtime.schedule.snapshots import NO_SNAPSHOT, SnapshotPool

ROOT = 0  # the prefix id of "nothing before"


def root_of(salt: str) -> int:
    """ROOT, or a negative prefix id instead, for requests that share with their own kind alone."""
    if not salt:
        return ROOT
    return -1 - (int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little") >> 1)


class BlockPool:
    """Blocks 1..count of ``block_size`` tokens.

    A published block is found by (prefix id of the blocks before it, its exact token ids): contents are compared, not
    hashed down, so two prompts can never collide. Prefix ids are given in order of publishing and never reused.
    A block is trusted once a token that was sampled over its contents has landed: before, it may hold NaN.
    ``snapshots``: of recurrent state after published blocks; a block that leaves the index loses its snapshot.
    ``fenced``: the steps after which blocks return, shared with other fences.
    """

    def __init__(
        self, count: int, block_size: int, snapshots: SnapshotPool | None = None, fenced: set[int] | None = None
    ) -> None:
        self.count = count
        self.block_size = block_size
        self._snapshots = snapshots
        self.refs = [0] * (count + 1)
        self._fenced_refs = [0] * (count + 1)
        self.soon_free = 0  # blocks whose every reference waits for a fence
        self._free = list(range(count, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fence: Fence[int] = Fence(fenced)
        self._index: dict[tuple[int, bytes], int] = {}
        self._key: list[tuple[int, bytes] | None] = [None] * (count + 1)
        self._trusted = bytearray(count + 1)
        self._prefix_id = [ROOT] * (count + 1)
        self._next_prefix_id = ROOT + 1
        self.drops = 0  # references dropped so far
        self.entered = 0  # blocks that became findable so far

    @property
    def free_count(self) -> int:
        """Blocks that can be taken now, the cached ones included."""
        return len(self._free) + len(self._cached)

    def take(self, wanted: int) -> list[int]:
        """``wanted`` fresh blocks with one reference each. The caller has checked ``free_count``."""
        taken = []
        for _ in range(wanted):
            block = self._free.pop() if self._free else self._forget_oldest()
            self.refs[block] = 1
            self._trusted[block] = False
            taken.append(block)
        return taken

    def _forget_oldest(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.forget([block])
        return block

    # ---- prefix index ----

    def key_of(self, token_ids: Sequence[int], index: int, parent: int) -> tuple[int, bytes]:
        """Index key of block ``index`` of ``token_ids``, after the blocks of prefix id ``parent``."""
        size = self.block_size
        return parent, packed(token_ids[index * size : (index + 1) * size]).tobytes()

    def lookup(
        self, token_ids: Sequence[int], most: int, first: int = 0, parent: int = ROOT, *, trusted: bool = False
    ) -> list[int]:
        """The longest chain of published blocks whose contents are blocks [first, most) of ``token_ids``.

        ``parent``: the prefix id of the blocks before ``first``. ``trusted``: only blocks that are.
        """
        found: list[int] = []
        for index in range(first, most):
            block = self._index.get(self.key_of(token_ids, index, parent))
            if block is None or (trusted and not self._trusted[block]):
                break
            found.append(block)
            parent = self._prefix_id[block]
        return found

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these count as free now and would not when shared."""
        return sum(1 for block in blocks if self.refs[block] == 0)

    def share(self, blocks: Sequence[int]) -> int:
        """One more reference to each; returns the prefix id of the last."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._cached[block]
            elif self.refs[block] == self._fenced_refs[block]:
                self.soon_free -= 1
            self.refs[block] += 1
        return self._prefix_id[blocks[-1]] if blocks else ROOT

    def publish(
        self, block: int, parent: int, token_ids: Sequence[int], index: int = 0, *, snapshot: int = NO_SNAPSHOT
    ) -> int:
        """Make ``block``, full with block ``index`` of ``token_ids``, findable. Returns what its successor continues.

        ``parent`` is that of the block before it, ROOT for the first: the prefix id that this returned for that one.
        Where equal contents are findable already, that block stays the one to find and this one stays private.

        ``snapshot``: a row that was taken for the state after it. The block takes the place of an equal one that has
        none, with its prefix id, so that a snapshot and its block come from the same steps: what breaks, breaks both.
        Where the equal one has a snapshot, the row is given back.
        """
        key = self.key_of(token_ids, index, parent)
        known, snapshots = self._index.get(key), self._snapshots
        if snapshot and snapshots is not None:
            if known is not None and snapshots.find(known):
                snapshots.give_back(snapshot)
            else:
                if known is not None:
                    self.forget([known])
                    self._enter(block, key, self._prefix_id[known])
                snapshots.keep(snapshot, block)
                known = self._index.get(key)
        if known is not None:
            return self._prefix_id[known]
        self._enter(block, key, self._next_prefix_id)
        self._next_prefix_id += 1
        return self._prefix_id[block]

    def _enter(self, block: int, key: tuple[int, bytes], prefix_id: int) -> None:
        self.entered += 1
        self._index[key] = block
        self._key[block] = key
        self._prefix_id[block] = prefix_id

    def prefix_id(self, block: int) -> int:
        """Prefix id of the findable ``block``, the parent of its successors."""
        return self._prefix_id[block]

    def has_snapshot(self, block: int) -> bool:
        """Whether the recurrent state after ``block`` was saved."""
        return self._snapshots is not None and self._snapshots.find(block) != NO_SNAPSHOT

    def findable(self, block: int) -> bool:
        """Whether ``block`` is in the prefix index."""
        return self._key[block] is not None

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove these from the prefix index; blocks published after them become unreachable too."""
        for block in blocks:
            key = self._key[block]
            if key is not None:
                del self._index[key]
                self._key[block] = None
                if self._snapshots is not None:
                    self._snapshots.drop(block)

    def forget_all(self) -> int:
        """Empty the prefix index; returns how many blocks were in it. Those that nothing refers to are free."""
        found = list(self._index.values())
        self.forget(found)
        self._free += self._cached
        self._cached.clear()
        return len(found)

    def trust(self, blocks: Sequence[int]) -> None:
        """A token that was sampled over the contents of all of these has landed."""
        for block in blocks:
            self._trusted[block] = True

    def untrusted(self, blocks: Sequence[int]) -> set[int]:
        """Those of ``blocks`` over which no landed token was sampled."""
        return {block for block in blocks if not self._trusted[block]}

    # ---- giving back ----

    def retire_after(self, step: int, blocks: Sequence[int]) -> None:
        """Drop one reference to each when ``step`` lands. Tails go first, so that they are forgotten first."""
        for block in reversed(blocks):
            self._fenced_refs[block] += 1
            if self._fenced_refs[block] == self.refs[block]:
                self.soon_free += 1
            self._fence.hold(step, block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each now: no step in flight can touch them."""
        for block in reversed(blocks):
            self._drop(block)

    def landed(self, step: int) -> None:
        for block in self._fence.landed(step):
            if self._fenced_refs[block] == self.refs[block]:
                self.soon_free -= 1
            self._fenced_refs[block] -= 1
            self._drop(block)

    def _drop(self, block: int) -> None:
        self.refs[block] -= 1
        self.drops += 1
        if self.refs[block] == 0:
            if self._key[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
        elif self.refs[block] == self._fenced_refs[block]:
            self.soon_free += 1

    def check(self, owned: Sequence[int]) -> None:
        """Raise unless references equal owners plus fences, and each block is one of free, cached, referred."""
        expected = [0] * (self.count + 1)
        for block in owned:
            expected[block] += 1
        for block in self._fence.held():
            expected[block] += 1
        if expected != self.refs:
            wrong = [b for b in range(self.count + 1) if expected[b] != self.refs[b]]
            counted = [(b, expected[b], self.refs[b]) for b in wrong]
            raise AccountingError(f"(block, owners + fences, references) differ: {counted}")
        pooled = sorted(self._free) + sorted(self._cached)
        idle = [b for b in range(1, self.count + 1) if self.refs[b] == 0]
        if sorted(pooled) != idle:
            raise AccountingError(f"unreferenced blocks {idle} and pooled blocks {sorted(pooled)} differ")
        soon = sum(1 for b in range(1, self.count + 1) if self.refs[b] and self._fenced_refs[b] == self.refs[b])
        if soon != self.soon_free:
            raise AccountingError(f"soon_free is {self.soon_free}, counted {soon}")
