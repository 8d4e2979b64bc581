"""What the sampler needs to know of a row, and which work a whole batch needs.

Knows: the per-row parameters as device tensors (SamplingInputs) and the static variant a graph is captured for
(SamplingVariant). Does not know: slots (slot_state.py fills the rows, by row -> slot), randomness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Protocol

from torch import Tensor

from runtime.schedule.request import MAX_TOP_LOGPROBS, SamplingParams

MOST_SHARED_TOP_K = 64  # up to this top_k, ranks exchange a fixed number of candidates instead of logits
TOP_LOGPROBS = (0, 1, 5, MAX_TOP_LOGPROBS)  # variants there are: one for each number would mean 21 times the captures


def _room_for(top: int) -> int:
    return next((room for room in TOP_LOGPROBS if room >= top), top)


class LogitsProcessor(Protocol):
    """What changes logits before a token is sampled, for the rows of one step (slots/feature.py)."""

    def apply(self, logits_BV: Tensor, vocab_start: int, rows: SamplingInputs, variant: SamplingVariant) -> Tensor:
        """Float32 or bfloat16 logits of the ids from ``vocab_start`` on, changed: a float32 copy, or in place where
        no step of ``variant`` reads the model's own. Graph-safe."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Parameters of B rows; also fit to be the slot table itself, B = slots, of which ``select`` gathers rows.

    Meanings and "off" values are SamplingParams'. ``position`` is the absolute index (prompt included) of the token
    that is drawn, that is, the number of tokens before it; with it the sequence becomes position + 1 tokens long.
    ``min_length`` and ``max_length`` are absolute as in SlotWrite: a stop id can only be drawn, and only counts, at
    position >= min_length; the sequence ends when position + 1 == max_length. ``stop_ids`` is padded with -1.
    ``finished`` is not zero in rows without a say: ghost rows and the padding slot. Columns may be strided views.
    ``processors`` run in this order; they are of these rows, so ``select`` leaves them out.
    """

    temperature: Tensor  # float32 [B]; 0 (or anything below 1e-6) is greedy
    top_k: Tensor  # int32 [B]; <= 0 off
    top_p: Tensor  # float32 [B]; >= 1 off
    min_p: Tensor  # float32 [B]; <= 0 off
    repetition_penalty: Tensor  # float32 [B]; 1 off
    presence_penalty: Tensor  # float32 [B]; 0 off
    frequency_penalty: Tensor  # float32 [B]; 0 off
    seed: Tensor  # int64 [B]; all 64 bits count
    position: Tensor  # int32 or int64 [B]
    min_length: Tensor  # int32 [B]
    max_length: Tensor  # int32 [B]
    stop_ids: Tensor  # int32 [B, K]
    finished: Tensor  # bool or int32 [B]
    processors: tuple[LogitsProcessor, ...] = ()

    def select(self, index_B: Tensor) -> SamplingInputs:
        """The rows ``index_B`` (int64) of this table, as fresh tensors."""
        *columns, _ = (f.name for f in fields(self))
        return SamplingInputs(**{name: getattr(self, name).index_select(0, index_B) for name in columns})


@dataclass(frozen=True, slots=True)
class SamplingVariant:
    """Which parts of sampling a graph contains: chosen on the host, one captured variant each.

    A feature that is on never changes a row that does not ask for it; a feature that is off must not be asked for by
    any row. ``random``: noise and temperature. ``filters``: top-k, top-p, min-p. ``penalties``: token counts.
    ``min_tokens``: stop ids masked under min_length. ``logprobs``: chosen token's log-probability and rank, and the
    ``top_logprobs`` most likely tokens (0..20). ``unbounded``: some row filters without a top_k of at most
    MOST_SHARED_TOP_K, so that ranks need whole rows of logits; without ranks to share them with it means nothing.
    ``edits``: logits of tokens that a request names (logit_edits.py). ``biases``: some row adds to them, so that edits
    make a float32 copy. ``grammars``: some row has a grammar, whose table masks draft tokens, or which forces some.
    """

    random: bool = False
    filters: bool = False
    penalties: bool = False
    min_tokens: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    unbounded: bool = False
    edits: bool = False
    biases: bool = False
    grammars: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}")

    @classmethod
    def covering(cls, params: Iterable[SamplingParams]) -> SamplingVariant:
        """A variant that serves all of ``params``, the smallest but for TOP_LOGPROBS; a greedy request's filters change
        nothing.
        """
        features = cls()
        for p in params:
            features |= cls(
                random=not p.greedy,
                filters=p.filtered,
                penalties=p.penalised,
                min_tokens=p.min_tokens > 0,
                logprobs=p.logprobs is not None,
                top_logprobs=_room_for(p.logprobs or 0),
                unbounded=p.filtered and not 0 < p.top_k <= MOST_SHARED_TOP_K,
                edits=p.edits_logits,
                biases=bool(p.logit_bias),
                grammars=bool(p.grammar),
            )
        return features

    def __str__(self) -> str:
        on = [f.name.replace("_", " ") for f in fields(self) if getattr(self, f.name) is True and f.name != "unbounded"]
        if self.top_logprobs:
            on.append(f"up to {self.top_logprobs} likely tokens")
        return ", ".join(on) if on else "greedy sampling"

    def __or__(self, other: SamplingVariant) -> SamplingVariant:
        """The variant that serves both."""
        return self if self == other else SamplingVariant(*map(max, _numbers(self), _numbers(other)))

    @classmethod
    def of(cls, numbers: Sequence[Any]) -> SamplingVariant:
        """From its fields as whole numbers."""
        columns = zip(fields(cls), numbers, strict=True)
        return cls(*(bool(number) if isinstance(f.default, bool) else number for f, number in columns))

    def covers(self, other: SamplingVariant) -> bool:
        """Whether rows that need ``other`` can run in this variant."""
        return self | other == self

    @property
    def reported(self) -> int:
        """int32 words that are reported with each sampled token: see SlotFeature.report."""
        return 2 + 2 * self.top_logprobs if self.logprobs else 0

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether each rank can reduce its own share of the vocabulary to a fixed number of candidates a row."""
        return not self.unbounded and not self.logprobs

    def on_ranks(self, ranks: int, drafts: bool = True) -> SamplingVariant:
        """The variant that is captured where so many ranks share a row: one rank draws all filters alike. ``drafts``:
        there are draft tokens; without, grammars are edits like others."""
        return replace(self, unbounded=self.unbounded and ranks > 1, grammars=self.grammars and drafts)


_numbers = attrgetter(*(f.name for f in fields(SamplingVariant)))
EVERY_FEATURE = SamplingVariant(True, True, True, True, True, MAX_TOP_LOGPROBS, True, True, True, True)
NARROWER_FEATURES = (  # what is offered where there is no memory for every feature at once
    replace(EVERY_FEATURE, penalties=False),
    replace(EVERY_FEATURE, penalties=False, logprobs=False, top_logprobs=0),
    SamplingVariant(random=True),
)

# Together these launch every sampling kernel in every form: logits as they are or reshaped in float32, with and without
# noise and filters, edited before that or not, on one rank or shared by several. Run once at start-up, so that no
# request waits for a compiler. Neither the number of rows nor that of likely tokens makes another form.
KERNEL_VARIANTS = (
    SamplingVariant(random=True),
    SamplingVariant(penalties=True),
    SamplingVariant(random=True, min_tokens=True),
    SamplingVariant(random=True, filters=True),
    SamplingVariant(random=True, filters=True, penalties=True, min_tokens=True),
    SamplingVariant(random=True, filters=True, unbounded=True),
    SamplingVariant(random=True, filters=True, penalties=True, min_tokens=True, unbounded=True),
    SamplingVariant(logprobs=True),
    SamplingVariant(edits=True, grammars=True),
    SamplingVariant(random=True, edits=True, grammars=True),
    SamplingVariant(random=True, edits=True, biases=True),
    SamplingVariant(penalties=True, edits=True, biases=True),
    SamplingVariant(random=True, min_tokens=True, edits=True, biases=True),
    SamplingVariant(random=True, penalties=True, min_tokens=True, edits=True, biases=True),
)
