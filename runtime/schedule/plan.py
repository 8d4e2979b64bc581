"""The messages across the seam between scheduling and execution: StepPlan out, StepResult in.

Knows: ints, tuples, and the events that agreed control records carry.
Does not know: how a plan is made (scheduler.py) or run (runtime/execute); no tensor appears here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from runtime.schedule.request import FinishReason, Request, SamplingParams

PADDING_SLOT: Final = 0  # of rows that no request has; requests have slots from 1 on
TRASH_BLOCK: Final = 0  # where padding and ghost rows write; requests hold blocks from 1 on

# ---- events: everything that may change a plan from outside, agreed by all ranks with the step it takes effect in ----


@dataclass(frozen=True, slots=True)
class Admit:
    """A new request joins the waiting queue.

    ``quantum`` > 0 makes it a session (sessions.py): it parks after this many tokens and resumes with Continue.
    ``keep``: it also parks, instead of ending, when its answer is complete, so that Extend can add a turn.
    """

    request: Request
    quantum: int = 0
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request now, whatever it is doing. Unknown or ended ids are ignored (the finish may be in flight).

    ``reason`` is CANCELLED, or STOP when the host found a stop string.
    """

    request_id: int
    reason: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop scheduling a request; it keeps its slot and blocks until memory is short. Idempotent."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Undo Pause. Idempotent."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Continue:
    """A session may generate ``tokens`` more in this turn, up to its budget.

    ``epoch``: the number of turns that the session has had. An older one is refused, as meant for an earlier turn.
    """

    request_id: int
    epoch: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Extend:
    """A parked session's next turn: append ``token_ids`` and answer with at most ``max_tokens`` tokens, ``tokens`` of
    them now. All earlier tokens become prompt.
    """

    request_id: int
    epoch: int
    token_ids: Sequence[int]
    max_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A new session ``request_id`` with the tokens and state of the parked session ``parent``; it is parked too.

    ``scored``: report log-probabilities of its tokens even if the parent does not.
    """

    request_id: int
    parent: int
    scored: bool = False


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """No later request finds what was computed until now. Live requests and sessions keep it, to themselves."""


@dataclass(frozen=True, slots=True)
class Tabled:
    """From now on all ranks hold the table of a grammar: ``key`` is Request.table_key of the requests that it is for,
    ``table`` a TokenTable (runtime/grammar_tables) as bytes, which no scheduler reads."""

    key: bytes
    table: bytes


@dataclass(frozen=True, slots=True)
class Compile:
    """All ranks compile ``grammar`` and report that they hold it; requests with it are admitted only then.

    ``number``: of this grammar, never used before. ``regular``: a table may replace its matcher, which then allows
    whatever spells a text. ``dropped``: numbers of grammars that no request uses any more."""

    number: int
    grammar: str
    regular: bool = False
    dropped: tuple[int, ...] = ()


Event = Admit | Cancel | Pause | Resume | Continue | Extend | Branch | ResetPrefixCache | Tabled | Compile

# ---- the plan of one step ----


class StepKind(IntEnum):
    PREFILL = 0
    DECODE = 1
    MIXED = 2  # decode rows and prefill chunks in one step


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """Initialise a slot's device row for a request that was just given it.

    ``length`` tokens of KV are already there (prefix-cache hit). ``max_length`` and ``min_length`` are absolute:
    the number of tokens (prompt + generated) at which the request ends by length, and under which no stop id counts.
    ``token_ids`` are the tokens known so far (prompt, plus generated ones when it was evicted and is recomputed) and
    ``prompt_length`` says how many of them are prompt: penalties count the two differently. Here and below, a scheduler
    gives token ids as ``array("i")``. ``resumes``: the slot is the request's already, and its state of those ``length``
    tokens, paged and recurrent, stays; or it is copied in this plan (SlotCopy).
    """

    slot: int
    epoch: int
    request_id: int
    length: int
    prompt_length: int
    min_length: int
    max_length: int
    token_ids: Sequence[int]
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParams
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class SlotUpdate:
    """Move the end of a session that holds ``slot``: it ends by length at ``max_length`` tokens from now on.

    ``revive``: the device had ended it, none of its steps is in flight, and it resumes. Without ``revive`` it has not
    reached its old length; if a stop id has ended it on the device, it stays ended.
    """

    slot: int
    max_length: int
    revive: bool


@dataclass(frozen=True, slots=True)
class Scored:
    """Prompt tokens whose log-probabilities were requested: positions [start, start + len(token_ids)).

    Each follows a token of the chunk that carries this, so the last of them may be the next chunk's first. ``top``:
    number of most likely tokens to report for each.
    """

    start: int
    token_ids: Sequence[int]
    top: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of a prefill or mixed step: tokens [start, start + len(token_ids)) of the slot's sequence.

    The row whose chunk is ``last`` samples the first new token into the slot; the others produce nothing. ``scored``
    is reported with this step, and never again when the request is recomputed.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    last: bool
    scored: Scored | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """One row without tokens: another answer to a prompt whose last chunk is in the same step.

    It samples its first token after that chunk's last one, into ``slot``. ``chunk``: index of that chunk in the plan.
    The full blocks of the prompt are in the table of both slots. Where the prompt ends within a block, ``copied`` is
    (that block, the answer's own): once the step has written the one, its contents are copied to the other.
    ``in_windows``: the same of each group with a window.
    """

    slot: int
    chunk: int
    copied: tuple[int, int] | None = None
    in_windows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """A forked session: ``slot`` starts with what ``source`` holds, copied before anything else of the step.

    Slot state is copied. The full blocks of KV are in the table of both; where the tokens with KV end within a
    block, ``copied`` is (that block, the new slot's own), and its contents are copied, too; ``in_windows``: the same of
    each group with a window. Nothing of ``source`` is in flight, and no slot or block is source of one copy and target
    of another.
    """

    source: int
    slot: int
    copied: tuple[int, int] | None = None
    in_windows: tuple[tuple[int, int], ...] = ()


class Constrained(NamedTuple):
    """A row that samples, of a request with a grammar. ``token_ids``: the tokens that its answer gained since the slot
    write, or since the last of these for ``slot``: all tokens of the answer have landed. ``most``: tokens that it may
    append; as many but one that its grammar forces, if it does, take the place of draft tokens.

    With ``place``, where the table with this ``key`` is from now on, they are the whole answer, and this is the last
    one for ``slot``: the device goes on by itself."""

    slot: int
    token_ids: Sequence[int]
    most: int = 1
    place: int | None = None
    key: bytes = b""


class StepPlan(NamedTuple):
    """One step, the same on every rank.

    ``slots``: row -> slot for the real rows; the same tuple object as the previous decode step's while membership did
    not change, so that staging can compare by identity. How many rows are launched is no part of the plan (LaunchSpec).
    ``block_writes``: (slot, index, block): entries of the device block table to set before anything else; page i of the
    n-th group with a window has index n * max_blocks + i, n from 1. They and
    ``slot_writes`` and ``slot_updates``, of other slots, take effect before the step's rows are gathered.
    ``width``: tokens a row may append in this step (W), 1 for prefill. A decode row writes W KV entries from its newest
    token's position on, and holds blocks for all of them. A row with a chunk appends one token at most, whatever W is.
    ``tree``: tokens of the draft tree that each decode row has, and entries that it writes; 0 where its W are a chain.
    ``chunks``: those of the rows after the first ``decode_rows``, in order: none in a decode step. ``forks``: those of
    the rows after these, in order.
    ``restored``: (snapshot, slot): recurrent state copied into a slot before the step's rows read it. ``saved``: (slot,
    snapshot): state copied after the step, of a row whose chunk ends with a block. The device reads and writes
    snapshots in the order of steps.
    ``copies``: of sessions that were forked; each has a slot write that ``resumes``. A plan may have these alone, as a
    decode step without rows. ``constrained``: rows that sample what a grammar allows, and append more than one token
    of a window only where it forces tokens."""

    step: int
    kind: StepKind
    slots: tuple[int, ...]
    epochs: tuple[int, ...]
    width: int
    slot_writes: tuple[SlotWrite, ...] = ()
    block_writes: tuple[tuple[int, int, int], ...] = ()
    chunks: tuple[Chunk, ...] = ()
    forks: tuple[Fork, ...] = ()
    slot_updates: tuple[SlotUpdate, ...] = ()
    restored: tuple[tuple[int, int], ...] = ()
    saved: tuple[tuple[int, int], ...] = ()
    copies: tuple[SlotCopy, ...] = ()
    tree: int = 0
    constrained: tuple[Constrained, ...] = ()

    @property
    def decode_rows(self) -> int:
        """Number of decode rows; they come first."""
        return len(self.slots) - len(self.chunks) - len(self.forks)

    def draws(self, row: int) -> bool:
        """Whether a row, if it is live, is to give a token: all are but those with a chunk that is not the last."""
        chunk = row - self.decode_rows
        return not 0 <= chunk < len(self.chunks) or self.chunks[chunk].last

    @property
    def prefill_tokens(self) -> int:
        """Tokens of all its chunks; 0 for a decode step."""
        return sum(len(chunk.token_ids) for chunk in self.chunks) if self.chunks else 0

    @property
    def row_tokens(self) -> int:
        """Tokens of a decode row that go through the model: W, or its whole tree."""
        return self.tree or self.width

    @property
    def packed_tokens(self) -> int:
        """Tokens of decode rows and chunks that go through the model."""
        return self.decode_rows * self.row_tokens + self.prefill_tokens

    @property
    def scored_tokens(self) -> int:
        """How many prompt tokens its chunks score."""
        return sum(len(chunk.scored.token_ids) for chunk in self.chunks if chunk.scored is not None)


class StepResult(NamedTuple):
    """What the device reports of one step, aligned with the plan's rows (padding rows not included).

    ``tokens`` is row-major, [rows, width] with the plan's width; of row i the first ``counts[i]`` are meant. The others
    mean nothing, but are the same on every rank, because the digest folds them. A row masked on the device (ghost) or
    without output (a prefill chunk that is not the last) has count 0. A live row of a decode step has 1 to width; with
    0 it appended nothing and continues. ``finish[i]`` is a FinishReason value. ``logprobs`` and ``prompt_logprobs`` are
    opaque to the scheduler: they travel to the outputs with their row index. ``prompt_logprobs`` has an entry a row
    where any row's chunk is ``scored``, else it is None.
    """

    step: int
    tokens: Sequence[int]
    counts: Sequence[int]
    finish: Sequence[int]
    logprobs: Any = None
    prompt_logprobs: Any = None


# ---- outputs ----


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended: all its generated token ids, in order, and why.

    ``rounds``: verification steps that it was a live row of; ``accepted``: draft tokens accepted in them.
    """

    request_id: int
    reason: FinishReason
    token_ids: tuple[int, ...]
    detail: str = ""
    rounds: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Parked:
    """A session used up its token quota and none of its steps is in flight. ``reason``: NONE if its budget is not
    spent, STOP or LENGTH if its answer is complete. ``tokens``: of this turn's answer so far.
    """

    request_id: int
    epoch: int
    reason: FinishReason
    tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """An event about a session (``verb``: its class) changed nothing; ``detail`` says why."""

    request_id: int
    verb: str
    detail: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """A parked session gave up slot and blocks: its next token quota recomputes ``tokens`` tokens."""

    request_id: int
    tokens: int


Notice = Parked | Refused | Evicted


class StepOutput(NamedTuple):
    """What one landed step (or one submitted event) means to callers: columns, one entry a row.

    ``request_ids[i]`` appended ``counts[i]`` tokens, ``tokens[i*width : i*width+counts[i]]``. An id of -1 marks a ghost
    row: its tokens are dropped, whatever its count. ``finished`` holds the requests that ended, each exactly once.
    ``notices``: session notifications, in order, to be delivered after the tokens.
    """

    step: int
    request_ids: Sequence[int] = ()
    tokens: Sequence[int] = ()
    counts: Sequence[int] = ()
    width: int = 1
    finished: tuple[Finished, ...] = ()
    logprobs: Any = None
    prompt_logprobs: Any = None
    notices: tuple[Notice, ...] = ()
