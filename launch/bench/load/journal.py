"""What happened in one run of a load: each request's times, and what the engine counted meanwhile.

Knows: which moments a request has, and what follows from them. Does not know: how requests are sent (generator.py),
what is reported of a run (figures.py). All times are seconds on time.perf_counter's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from launch.errors import BenchError

Counts = Mapping[str, int | float]


@dataclass(slots=True)
class Served:
    """One request. ``due``: when its schedule has it. ``began``: from when its latencies count: when it was due or,
    where --max-concurrency held it back, when a place was free. ``sent``: when it was handed over, never earlier.

    ``moments``: when each portion of tokens arrived, ``counts`` how many each had. ``reason`` is the wire name of how
    it ended; ``error`` says why it failed, and is empty if it did not.
    """

    prompt_tokens: int
    due: float
    began: float
    sent: float
    moments: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: float = 0.0
    reason: str = ""
    error: str = ""

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def failed(self) -> bool:
        return bool(self.error) or not self.moments

    @property
    def ttft(self) -> float:
        return self.moments[0] - self.began

    @property
    def e2el(self) -> float:
        return self.moments[-1] - self.began

    @property
    def tpot(self) -> float | None:
        """(last token - first token) / (tokens - 1); None with a single token."""
        tokens = self.tokens
        return None if tokens < 2 else (self.moments[-1] - self.moments[0]) / (tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between one portion of tokens and the next: what vLLM calls itl."""
        return [after - before for before, after in pairwise(self.moments)]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step that landed: its number, when, how many requests gained a token in it, and how many tokens."""

    step: int
    at: float
    rows: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters of the engine at a moment of a run; each only grows. ``step``: the latest step that had landed."""

    at: float
    step: int
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Journal:
    """A run, from the moment before the first request was sent until the last had ended.

    ``samples``: about every 0.1 s, the first at the start and the last at the end; none of a server over a socket.
    ``before``, ``after``: everything that the engine counts, around the run. ``decode_steps``: those in which a request
    with a token gained another.
    """

    started: float
    ended: float
    requests: Sequence[Served]
    samples: Sequence[Sample] = ()
    before: Counts = field(default_factory=dict)
    after: Counts = field(default_factory=dict)
    decode_steps: Sequence[DecodeStep] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def good(self) -> list[Served]:
        """Those that did not fail."""
        return [one for one in self.requests if not one.failed]

    @property
    def chained(self) -> float:
        """Share of the engine's steps that were planned while an earlier one was in flight."""
        return self.grown("chained_steps") / self.grown("steps")

    def grown(self, counter: str) -> float:
        """How much the engine counted in the run."""
        return self.after.get(counter, 0) - self.before.get(counter, 0)

    def require_complete(self) -> None:
        """Raises BenchError unless every request ended by itself; with eos ignored, at its full length."""
        for number, one in enumerate(self.requests):
            if one.error:
                raise BenchError(f"request {number} {one.error}")
