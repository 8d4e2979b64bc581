"""The rolling digest of everything a rank decided: 64 bits that two ranks compare instead of their plans.

Knows: how decisions are folded, and the last few of them, so that a disagreement can be reported decision by decision.
Does not know: what a decision means, who compares digests or when (parallel/control).

The digest after decision i is blake2b-64 over (digest after i-1, step, kind, decision), integers packed as
little-endian int64. It depends on nothing else: not on the process, the hash seed, the Python version or the machine's
byte order. It is a checksum against accidents, not against forged plans.
"""

from __future__ import annotations

import struct
from collections import deque
from hashlib import blake2b
from typing import NamedTuple

RECENT_DECISIONS = 256  # kept for reports; a few dozen steps' worth

_HEADER = struct.Struct("<QqqH")  # digest before, step, length of the decision (negative: bytes), length of the kind
_CACHED_LENGTHS = 4096  # longer decisions (prompts) are rare enough to build their format each time


class Decision(NamedTuple):
    """One folded decision. ``number`` counts all folds of this digest from 0; ``value`` is the digest after it."""

    number: int
    step: int
    kind: str
    decision: tuple[int, ...] | bytes
    value: int


class RollingDigest:
    """Folds decisions into ``value``; two ranks that folded the same decisions in the same order have the same value.

    Fold once for each thing that changes (an admission, a freed block list) and once for a step's whole row, rather
    than once for each row: a fold costs about a microsecond, an integer in it a few nanoseconds.
    """

    __slots__ = ("_formats", "_kinds", "_recent", "folds", "value")

    def __init__(self, keep: int = RECENT_DECISIONS) -> None:
        self.value = 0
        self.folds = 0
        # As packed bytes: tuples of a thousand integers would be looked at by the garbage collector, 2 to 4 ms a time.
        self._recent: deque[tuple[int, int, str, bool, bytes, int]] = deque(maxlen=keep)
        self._formats: dict[int, struct.Struct] = {}
        self._kinds: dict[str, bytes] = {}

    def fold(self, step: int, kind: str, decision: tuple[int, ...] | bytes) -> None:
        """Fold one decision of ``step``. ``kind`` is a short constant name ("admit", "plan", "land").

        Integers must fit int64. Raises ValueError naming the kind and the step when one does not, or is no integer.
        """
        length = len(decision)
        if isinstance(decision, bytes):
            packed, length = decision, -length - 1
        else:
            packed = self._pack(step, kind, decision)
        name = self._kinds.get(kind)
        if name is None:
            name = self._kinds[kind] = kind.encode()
        header = _HEADER.pack(self.value, step, length, len(name))
        self.value = value = int.from_bytes(blake2b(header + name + packed, digest_size=8).digest(), "little")
        self._recent.append((self.folds, step, kind, length < 0, packed, value))
        self.folds += 1

    def recent(self) -> tuple[Decision, ...]:
        """The last decisions, oldest first."""
        return tuple(
            Decision(number, step, kind, packed if raw else struct.unpack(f"<{len(packed) // 8}q", packed), value)
            for number, step, kind, raw, packed, value in self._recent
        )

    def _pack(self, step: int, kind: str, decision: tuple[int, ...]) -> bytes:
        length = len(decision)
        packer = self._formats.get(length)
        if packer is None:
            packer = struct.Struct(f"<{length}q")
            if length < _CACHED_LENGTHS:
                self._formats[length] = packer
        try:
            return packer.pack(*decision)
        except struct.error as error:
            bad = next(x for x in decision if not isinstance(x, int) or not -(1 << 63) <= x < 1 << 63)
            raise ValueError(
                f"digest: decision {kind!r} of step {step} holds {bad!r}, which is not an int64; "
                "fold integers in [-2**63, 2**63), or encode the decision as bytes"
            ) from error
