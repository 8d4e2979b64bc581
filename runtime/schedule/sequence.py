"""SequenceState: the scheduler's own record of one request, from arrival to end.

Knows: its tokens, its two counts, what it holds. Does not know: any other sequence, or when to do what (scheduler.py).

``landed_tokens`` (settled: prompt + generated tokens whose step has landed) is what output and freeing rest on;
``planned_tokens`` (an upper bound of what landed_tokens will be once every step in flight has landed) is what block
reservation and buckets rest on: landed_tokens + W for each token-bearing step in flight. There is no third count.
"""

from __future__ import annotations

from runtime.schedule.blocks import ROOT
from runtime.schedule.chain import State
from runtime.schedule.plan import Scored
from runtime.schedule.request import Request


class SequenceState:
    """One request's state. ``order`` is its place in line: (priority, arrival)."""

    __slots__ = (
        "blocks",
        "epoch",
        "given_up",
        "last_step",
        "max_length",
        "order",
        "paused",
        "planned_tokens",
        "prefill_target",
        "prefilled",
        "prefix_id",
        "queued",
        "request",
        "score_at",
        "settle_at",
        "settled_blocks",
        "slot",
        "state",
        "tokens",
        "wake_at",
    )

    def __init__(self, request: Request, arrival: int, max_length: int) -> None:
        self.request = request
        self.order = (request.priority, arrival)
        self.state = State.WAITING
        self.max_length = max_length  # prompt + generated tokens at which it ends by length
        self.tokens = list(request.prompt_token_ids)  # prompt + landed generated tokens
        self.planned_tokens = len(self.tokens)
        self.prefilled = 0  # tokens whose KV is written by landed or planned steps, while prefilling
        self.prefill_target = 0  # tokens known when it was admitted; the chunk that reaches it samples a token
        self.queued = False  # whether the waiting queue still has an entry for it, stale or not
        self.last_step = -1  # the last step that may touch its slot and blocks
        self.slot = 0
        self.epoch = 0
        self.blocks: list[int] = []
        self.given_up: list[int] = []  # what it last held, and steps in flight may still tell something about
        self.wake_at = 0  # planned_tokens at which decode must think again: out of blocks, or at the end
        self.settled_blocks = 0
        self.settle_at = 0  # landed_tokens at which the next block is full and settled
        self.prefix_id = ROOT  # of the last settled block
        self.paused = False
        scoring = request.sampling.prompt_logprobs is not None
        self.score_at = 1 if scoring else len(self.tokens)  # the next prompt position to score; nothing predicts 0

    def take_scored(self, end: int) -> Scored | None:
        """The prompt tokens that become predictable with tokens [0, end) and were not scored yet; now they are."""
        prompt = self.request.prompt_token_ids
        start, stop = self.score_at, min(end + 1, len(prompt))
        if start >= stop:
            return None
        self.score_at = stop
        return Scored(start, prompt[start:stop], self.request.sampling.prompt_logprobs or 0)

    @property
    def landed_tokens(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt_token_ids) :])
