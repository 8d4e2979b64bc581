"""What an answer looks like to the person who asked, piece by piece and whole: text, token ids, reason, timing.

Knows: the shape of an answer. Does not know: how it is put together (output_processor.py) or written down
(launch/api/response.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.schedule.request import FinishReason

if TYPE_CHECKING:
    from runtime.execute.sampling.logprobs import PromptLogprobs


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token and, most likely first, of the best ones in its place.

    There are ``logprobs`` of those for a generated token, ``prompt_logprobs`` for one of the prompt.

    ``rank`` is 1 for the most likely token of the vocabulary.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One of a request's ``n`` answers.

    ``token_ids`` ends with the token that ended it (the eos or stop id, or the token that completed a stop string);
    ``text`` ends before the stop. ``logprobs`` is aligned with ``token_ids``; None if not requested. ``rounds``: steps
    that checked proposals for it; ``accepted``: proposals that were kept, of which some may lie after a stop string.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    detail: str = ""
    rounds: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. ``queued``: from arrival until handed to the engine. ``ttft``: from there to the first token of any
    answer. ``tpot``: (last token - first token) / (tokens - 1), the mean over the answers; None with one token.
    ``e2e``: from arrival to the end.
    """

    queued: float
    ttft: float | None
    tpot: float | None
    e2e: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request that ended. ``key`` is the caller's own id; ``prompt`` is None when ids were given instead of text.

    ``prompt_token_ids`` is an ``array("i")`` as a rule: four bytes a token, for as long as the caller keeps it.
    ``prompt_logprobs`` is aligned with ``prompt_token_ids``; None if not requested. Its first entry is None, for
    nothing predicts the first token, and so are those that a request which ended early did not come to.
    """

    key: Hashable
    prompt: str | None
    prompt_token_ids: Sequence[int]
    completions: tuple[Completion, ...]
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_parts: tuple[PromptLogprobs, ...] | None = None  # the same as it came, in its place, where ``apart``

    @property
    def failed(self) -> Completion | None:
        """The first answer that ended without a result (not by stop or length), or None."""
        fine = (FinishReason.STOP, FinishReason.LENGTH)
        return next((c for c in self.completions if c.finish_reason not in fine), None)

    @property
    def generated_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one of a streamed request's ``n`` answers gained in a turn.

    An answer's deltas, put together, are its Completion: the texts, the token ids, the log-probabilities. ``text`` may
    be empty where there are tokens: their bytes are no whole character yet, or could begin a stop string. The last one
    of an answer has the ``finish_reason``; the last one of the request also has the whole ``output``.
    """

    key: Hashable
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
