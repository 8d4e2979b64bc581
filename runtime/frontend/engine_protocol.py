"""What a front end needs of an engine: the verbs of the leader's loop, and the one verb of a follower.

Knows: names and promises. Does not know: how an engine keeps them (runtime/engine.py); tests keep them with a fake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from runtime.config import EngineConfig
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams


class ModelFacts(Protocol):
    """What a front end must know of the model to check a request."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def quantization(self) -> str | None: ...
    def lacks_memory_for(self, sampling: SamplingParams) -> str | None:
        """Why this engine cannot draw so, and what to type; None where it can."""
        ...


class Occupancy(NamedTuple):
    """How full an engine is now: requests that run and that wait, KV blocks that requests hold, and all of them."""

    running: int
    waiting: int
    used_blocks: int
    blocks: int


class EngineProtocol(Protocol):
    """One per rank. ``add``, ``cancel``, ``step`` and ``stop`` are the leader's; ``follow`` is everybody else's.

    Every added request is reported in ``StepOutput.finished`` exactly once, with all its tokens, whatever happens.
    ``StepOutput.logprobs``, when not None, is a StepLogprobs (runtime/execute/result_reader.py) aligned with the rows,
    and ``prompt_logprobs`` a tuple with a PromptLogprobs (runtime/execute/sampling/logprobs.py) or None for each
    row. ``counters`` has at least ``steps``, ``chained_steps``, ``ghost_rows``, ``wasted_tokens`` and one
    ``chain_breaks{reason}`` for each reason that occurred; where there are groups (EngineConfig.data_parallel), also
    ``group_requests{g}`` and ``group_idle_steps{g}``, while the rest is of the leader's group.
    """

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_config(self) -> ModelFacts: ...
    @property
    def stopped(self) -> bool:
        """The agreed end is in effect, for good: no turn is left to take."""
        ...

    @property
    def has_work(self) -> bool: ...
    @property
    def compiling(self) -> int:
        """Answers of added requests that wait for their grammars, which no rank's scheduler has yet."""
        ...

    @property
    def counters(self) -> Mapping[str, int | float]: ...

    def add(self, request: Request) -> None:
        """Make the arrival of ``request`` an agreed event. Its ``request_id`` is new.

        Raises RequestError (validation.py) for one that cannot be served as it stands, before any rank receives it.
        """
        ...

    def bind_thread(self) -> None:
        """Called first by the thread that takes turns, where it is not the one that made the engine."""
        ...

    def cancel(self, request_id: int, reason: FinishReason) -> None:
        """End a request soon; unknown and ended ids are ignored."""
        ...

    def reset_prefix_cache(self) -> None:
        """Requests that are added from now on find nothing in the prefix cache that was computed before."""
        ...

    def step(self) -> StepOutput:
        """Advance by one step; the output is empty when nothing landed."""
        ...

    def slack(self) -> float:
        """Seconds for which ``step`` may be put off without the device running dry (plan_late.py). 0: take it now.

        For callers that receive requests from another thread or process meanwhile; they ask again after each wait.
        """
        ...

    def wait(self, ready: Callable[[float], bool], timeout: float) -> None:
        """Called instead of ``step`` while there is nothing to run, so that the other ranks know that all is well.

        ``ready(seconds)`` waits up to that long for new work and says whether there is some; at most ``timeout``.
        """
        ...

    def stop(self) -> None:
        """Agree on the end: every follower's ``follow`` returns."""
        ...

    def follow(self) -> None:
        """Run the leader's steps until it stops."""
        ...
