"""What speculation gained in a measurement: from counters before and after it, and from the steps of a full batch.

Knows: how rounds become figures. Does not know: how a measurement is driven (latency.py, throughput.py, serve.py).
Acceptance by a script is labelled ``synthetic`` in every figure: its texts mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.bench.load.journal import DecodeStep
from runtime.config import EngineConfig

FEWEST_STEPS = 4  # of a full batch, between which a step's time is taken


@dataclass(frozen=True, slots=True)
class Rounds:
    """``label``: the method, and whether acceptance was synthetic. ``rounds``: live rows of windows; ``proposed``:
    tokens in them, of which ``accepted`` were kept; ``kept_by_place``: in how many rounds the first, the second, ...
    was kept; ``compared_by_place``: in how many it followed kept ones only. ``off``: decode steps that were no
    windows, by reason; ``narrowed``: steps with fewer drafts a row, by their number.
    """

    label: str
    num_speculative_tokens: int
    rounds: int
    proposed: int
    accepted: int
    kept_by_place: tuple[int, ...]
    compared_by_place: tuple[int, ...]
    off: Mapping[str, int]
    narrowed: Mapping[str, int]

    @property
    def accepted_length(self) -> float | None:
        """Tokens that a round gained on average, the one that the target drew itself included."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def recall(self) -> list[float | None]:
        """Recall@1 by place: how often the draft was what the model drew there, where all before it were."""
        both = zip(self.kept_by_place, self.compared_by_place, strict=True)
        return [kept / compared if compared else None for kept, compared in both]

    def figures(self) -> dict[str, Any]:
        """Under vLLM's names, as its bench serve has them; it has no recall."""
        return {
            "speculation": self.label,
            "num_speculative_tokens": self.num_speculative_tokens,
            "spec_decode_num_drafts": self.rounds,
            "spec_decode_draft_tokens": self.proposed,
            "spec_decode_accepted_tokens": self.accepted,
            "spec_decode_acceptance_rate": 100 * self.accepted / self.proposed if self.proposed else None,
            "spec_decode_acceptance_length": self.accepted_length,
            "spec_decode_per_position_acceptance_rates": [
                kept / self.rounds if self.rounds else 0.0 for kept in self.kept_by_place
            ],
            "spec_decode_per_position_recall": self.recall,
            "speculation_off": dict(self.off),
            "speculation_narrowed": dict(self.narrowed),
        }

    def text(self) -> str:
        """On one line, for a person."""
        if not self.rounds:
            return f"{self.label}, k = {self.num_speculative_tokens}: no round; steps without: {_listed(self.off)}"
        kept = " ".join(f"{kept / self.rounds:.2f}" for kept in self.kept_by_place)
        recall = " ".join("n/a" if share is None else f"{share:.2f}" for share in self.recall)
        return (
            f"{self.label}, k = {self.num_speculative_tokens}: {self.accepted_length:.2f} tokens a round, kept by "
            f"place {kept}, recall@1 {recall}; steps without: {_listed(self.off)}"
            + (f"; with fewer guesses: {_listed(self.narrowed)}" if self.narrowed else "")
        )


def rounds_between(
    config: EngineConfig, before: Mapping[str, int | float], after: Mapping[str, int | float]
) -> Rounds | None:
    """From an engine's counters at two moments; None where it does not speculate."""
    if config.speculation is None:
        return None
    k = config.speculation.num_speculative_tokens

    def grown(name: str) -> int:
        return int(after.get(name, 0) - before.get(name, 0))

    def narrowed(fewer: int) -> int:
        return grown(f"speculation_narrowed{{{fewer}}}")

    off = {name: grown(f"speculation_off{{{name}}}") for name in ("batch", "gain", "mixed")}
    return Rounds(
        config.speculation.label,
        k,
        grown("spec_num_drafts"),
        grown("spec_num_draft_tokens"),
        grown("spec_num_accepted_tokens"),
        tuple(grown(f"spec_accepted_per_position{{{place}}}") for place in range(k)),
        tuple(grown(f"spec_compared_per_position{{{place}}}") for place in range(k)),
        {name: count for name, count in off.items() if count},
        {str(width - 1): count for width in config.narrower if (count := narrowed(width - 1))},
    )


@dataclass(frozen=True, slots=True)
class FullSteps:
    """The decode steps of a full batch: seconds a step, and tokens that a row gained in one. ``refused``: why there is
    neither."""

    step_s: float = 0.0
    tokens: float = 0.0
    refused: str | None = None


def full_steps(steps: Sequence[DecodeStep], rows: int) -> FullSteps:
    """While all ``rows`` requests decoded: rows that gain more than others end sooner, and what is left is no batch."""
    full = [step for step in steps if step.rows == rows]
    if len(full) < FEWEST_STEPS:
        return FullSteps(
            refused=f"{len(full)} decode steps ran all {rows} rows, too few to time: ask for longer answers"
        )
    gained = sum(step.tokens for step in full[1:])
    return FullSteps((full[-1].at - full[0].at) / (len(full) - 1), gained / rows / (len(full) - 1))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
