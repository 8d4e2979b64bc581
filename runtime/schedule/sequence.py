"""SequenceState: the scheduler's record of one request, from arrival to end.

Knows: its tokens, its counts, what it holds. Does not know: other sequences, or when to do what (planner.py).

``landed_tokens`` (prompt + generated tokens whose step has landed) decides about output and about freeing.
``planned_tokens`` is the upper bound of what landed_tokens will be once every step in flight has landed: landed_tokens
+ W for each token-bearing step in flight, each with the W of its plan. It decides about blocks. A row of a step of
width W appends one token for certain and up to W - 1 more: ``uncertain_tokens`` are those, so planned_tokens -
uncertain_tokens is the lower bound, landed_tokens + the number of token-bearing steps in flight. It decides when a
request needs no more steps. While all widths are 1 the two bounds are equal, and uncertain_tokens is not touched.
"""

from __future__ import annotations

from array import array
from dataclasses import InitVar, dataclass, field

from runtime.schedule.blocks import root_of
from runtime.schedule.plan import Scored
from runtime.schedule.request import FinishReason, Request, packed
from runtime.schedule.snapshots import NO_SNAPSHOT
from runtime.schedule.states import State
from runtime.schedule.tables import Place
from runtime.schedule.window_pool import WindowPages

NOT_WAITING = -1
NOT_QUEUED = -1


@dataclass(slots=True)
class Session:
    """Session fields of a sequence, whose ``max_length`` is the end of the token quota. Lengths are absolute.

    ``budget_length``: where this turn's answer ends by length. ``wanted_length``: the end that its events asked for.
    ``keep``: it parks, instead of ending, when its answer is complete. ``min_tokens``: of each turn, unless its budget
    is smaller. ``epoch``: its number of turns. ``over``: why its quota ended; None while it runs. ``revive``: the
    device has ended its slot, and the next plan must resume it. ``extends``: it holds a slot and has tokens to prefill.
    ``parked_at`` and ``since``: when it was last parked and last resumed, on one common count.
    """

    budget_length: int
    wanted_length: int
    keep: bool
    min_tokens: int
    epoch: int = 1
    over: FinishReason | None = None
    revive: bool = False
    extends: bool = False
    parked_at: int = 0
    since: int = 0


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request's state. ``order`` is its place in line: (priority, arrival)."""

    request: Request
    arrival: InitVar[int]
    max_length: int  # prompt + generated tokens at which it ends by length
    order: tuple[int, int] = field(init=False)
    state: State = State.WAITING
    tokens: array[int] = field(init=False)  # prompt + landed generated tokens; own copy after ``seated``
    planned_tokens: int = field(init=False)
    uncertain_tokens: int = 0
    rounds: int = 0  # landed verification steps that it was a live row of
    accepted: int = 0  # draft tokens accepted in them
    prefill_begun: bool = False  # whether a chunk has been cut since its admission
    prefilled: int = 0  # tokens whose KV is written by landed or planned steps, while prefilling
    prefill_target: int = 0  # tokens known at admission; the chunk that reaches it samples a token
    seated_before: bool = False  # whether it has held a slot at any time
    queued_in: int = NOT_QUEUED  # the queue class that has an entry for it, stale or not
    last_step: int = -1  # the last step that may touch its slot and blocks
    slot: int = 0
    slot_ended: bool = False  # its rows in flight are ghosts, although it has not ended itself
    epoch: int = 0
    matched: int = 0  # with a grammar: known tokens that plans have reported
    table: Place | None = None  # by which the device applies its grammar
    table_key: bytes = b""  # Request.table_key, once it was asked for
    blocks: list[int] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)  # blocks it held last; steps in flight may report on them
    windows: tuple[WindowPages, ...] = ()  # what it holds of each group with a window
    chunks: tuple[tuple[int, int], ...] = ()  # with windows, (step, start) of those in flight
    wake_at: int = 0  # planned_tokens at which a decode row needs a decision: out of blocks, or near its end
    published_blocks: int = 0
    publish_at: int = 0  # landing so many tokens, or more, makes further blocks findable, or trusted
    root: int = field(init=False)
    prefix_id: int = field(init=False)  # of the last published block
    private: bool = False  # what it holds is older than a reset of the prefix cache: it is neither found nor shared
    borrowed: bool = False  # since its admission it shares blocks that were not trusted then
    trusted: bool = False  # since its admission a token of it has landed, so all its blocks are trusted
    alone: bool = False  # it broke, or may have, over untrusted blocks: it shares trusted ones only
    waits_since: int = NOT_WAITING  # the step since which another request is to write its next block
    restores: int = NO_SNAPSHOT  # the snapshot that its slot starts from; pinned until its next chunk is cut
    state_at: int = 0  # tokens at which its state was last restored or saved
    stop_at: int = 0  # tokens at which its next chunk ends at the latest, to leave a snapshot; 0: nowhere
    branch_at: int = 0  # tokens whose KV could be found when its first chunk was cut, but not their state
    known_blocks: int = 0  # its blocks that the index had at its last look-up; with the two below, of the last of them
    known_id: int = field(init=False)  # prefix id
    known_last: int = 0  # block
    paused: bool = False
    score_at: int = field(init=False)  # the next prompt position to score; nothing predicts 0
    answers: list[SequenceState] = field(default_factory=list)  # unfinished ones to its prompt; empty if n is 1
    session: Session | None = None
    resumes: bool = False  # its next slot write is for the slot that it holds, whose state stays
    joins: SequenceState | None = None  # while JOINING: whose prompt it waits for
    expects_fork: bool = False  # an answer before it in line is to compute the prompt for both

    def __post_init__(self, arrival: int) -> None:
        request = self.request
        self.order = (request.priority, arrival)
        self.tokens = packed(request.prompt_token_ids)
        self.planned_tokens = len(self.tokens)
        self.root = self.prefix_id = self.known_id = root_of(request.sampling.cache_salt)
        self.score_at = 1 if request.sampling.prompt_logprobs is not None else len(self.tokens)

    def take_scored(self, end: int) -> Scored | None:
        """The prompt tokens that tokens [0, end) predict and that were not scored yet; now they are."""
        prompt = self.request.prompt_token_ids
        start, stop = self.score_at, min(end + 1, len(prompt))
        if start >= stop:
            return None
        self.score_at = stop
        return Scored(start, prompt[start:stop], self.request.sampling.prompt_logprobs or 0)

    def seated(self, slot: int, epoch: int) -> None:
        """It holds a slot from now on, and no block yet. Before its first slot it shared its prompt's memory."""
        if self.tokens is self.request.prompt_token_ids:
            self.tokens = self.tokens[:]
        self.slot, self.slot_ended, self.epoch, self.blocks = slot, False, epoch, []
        self.chunks = ()
        self.seated_before, self.prefill_begun, self.resumes = True, False, False
        self.expects_fork = False
        self.prefill_target = self.matched = self.landed_tokens
        self.prefilled = self.published_blocks = self.publish_at = 0
        self.waits_since = NOT_WAITING
        self.prefix_id = self.root
        self.private = self.borrowed = self.trusted = False
        self.restores = NO_SNAPSHOT
        self.state_at = self.stop_at = self.branch_at = self.known_blocks = self.known_last = 0
        self.known_id = self.root

    @property
    def room_order(self) -> tuple[int, int, int]:
        """Its place among sequences that wait for room: resumed sessions after others, in the order of resuming."""
        priority, arrival = self.order
        session = self.session
        if session is not None and (session.revive or session.extends):
            return priority, 1, session.since
        return priority, 0, arrival

    @property
    def constrained(self) -> bool:
        """Whether the host applies its grammar: it is a row only while none of its steps is in flight."""
        return bool(self.request.sampling.grammar) and self.table is None

    @property
    def untouched(self) -> bool:
        """Whether it knows its prompt and nothing more."""
        return self.landed_tokens == len(self.request.prompt_token_ids)

    @property
    def prefilling(self) -> bool:
        """Whether chunks of it are still to be cut."""
        return self.state is State.PREFILL

    @property
    def scoring(self) -> bool:
        """Whether some of its prompt tokens are still to be scored."""
        return self.score_at < len(self.request.prompt_token_ids)

    @property
    def landed_tokens(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt_token_ids) :])
