"""Where prompts that begin alike were sent: which groups have computed how much of a prompt before.

Knows: beginnings of prompts, by digest, and the groups they went to. Pure, and equal on every rank that saw the same
arrivals. Does not know: loads, what a group's cache still holds.

A prompt is remembered by its first 64, 128, 256, ... tokens, so that a chat finds its own group again and not only one
that has seen the same system prompt. The oldest beginnings are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from runtime.schedule.request import packed

SHORTEST = 64  # tokens; shorter beginnings are not worth another group
MOST = 1 << 16  # beginnings that are remembered: some 15 MB


class PrefixHomes:
    """``find`` before a prompt is assigned, ``remember`` after it, on every rank in the same order."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._homes: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def find(self, token_ids: Sequence[int], salt: str = "") -> list[tuple[int, ...]]:
        """The groups that had a prompt with the same beginning, for each length there is, the longest first."""
        found = [homes for key in _beginnings(token_ids, salt) if (homes := self._homes.get(key)) is not None]
        return found[::-1]

    def remember(self, token_ids: Sequence[int], group: int, salt: str = "") -> None:
        """The prompt goes to ``group``."""
        for key in _beginnings(token_ids, salt):
            homes = self._homes.pop(key, ())
            self._homes[key] = homes if group in homes else (*homes, group)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)


def _beginnings(token_ids: Sequence[int], salt: str) -> Iterator[bytes]:
    """Digests of the first 64, 128, 256, ... token ids, as far as there are so many, of requests with this salt."""
    contents, digest = memoryview(packed(token_ids)), blake2b(salt.encode(), digest_size=8)
    done, length = 0, SHORTEST
    while length <= len(contents):
        digest.update(contents[done:length])
        yield digest.digest()
        done, length = length, 2 * length
