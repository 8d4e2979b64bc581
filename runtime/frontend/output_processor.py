"""From the engine's columns of tokens to finished answers: one record a running sequence, one group a request.

Knows: which sequences belong to a request, their text while stop strings need it, when what happened.
Does not know: where requests come from, where answers go, or how the engine works. It does no I/O: what is to be
cancelled is returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from runtime.frontend.logprobs import prompt_logprobs, row_logprobs
from runtime.frontend.outputs import Completion, RequestOutput, Timing, TokenLogprob
from runtime.frontend.tokenizer import TextStream, Tokenizer
from runtime.frontend.validation import MAX_STOP_TOKEN_IDS, RequestError
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from runtime.execute.sampling.prompt_logprobs import PromptLogprobs


class Routed(NamedTuple):
    """What one step output led to: ``stop`` are request ids that hit a stop string and should be cancelled as STOP."""

    finished: list[RequestOutput]
    stop: list[int]


@dataclass(slots=True)
class _Group:
    """A request and its ``n`` answers, as far as they have come."""

    key: Hashable
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    arrived_at: float
    opened_at: float
    answers: list[Completion | None]
    prompt_parts: list[PromptLogprobs] | None  # None: nobody asked for the prompt's log-probabilities
    first_at: float | None = None
    gaps: list[float] = field(default_factory=list)  # mean seconds between tokens, one entry an answer that ended


@dataclass(slots=True)
class _Sequence:
    """One answer that is being generated."""

    group: _Group
    index: int
    request: Request
    stream: TextStream | None  # only where stop strings need the text before the end
    logprobs: list[TokenLogprob] | None
    first_at: float | None = None
    stopped_at: float | None = None  # when its stop string was found; the engine ends it some steps later

    @property
    def watched(self) -> bool:
        """Whether the next tokens must be looked at one by one."""
        return self.first_at is None or self.stream is not None or self.logprobs is not None


class OutputProcessor:
    """``open`` a request, hand its parts to the engine, ``route`` every step output until the answer comes out.

    ``tokenizer`` None gives empty texts (and refuses stop strings). ``clock`` returns seconds.
    """

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._next_id = 0
        self._live: dict[int, _Sequence] = {}

    @property
    def live(self) -> int:
        """Sequences that were opened and have not ended."""
        return len(self._live)

    def not_begun(self) -> list[int]:
        """Request ids of live sequences without a single token."""
        return [request_id for request_id, sequence in self._live.items() if sequence.first_at is None]

    def live_ids(self) -> list[int]:
        return list(self._live)

    def open(
        self,
        key: Hashable,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        arrived_at: float | None = None,
    ) -> tuple[Request, ...]:
        """The ``n`` sequences of a request, to be added to the engine in this order, now.

        ``sampling.seed`` must be set; answer i is drawn with seed + i, so that each can be had again alone.
        ``arrived_at`` is a time of the same clock, by default now. Raises RequestError for too many stop ids.
        """
        if sampling.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the model folder has none")
        if sampling.seed is None:
            raise RequestError("the seed is not set: draw one with drawn_seed()")
        now = self._clock()
        group = _Group(
            key,
            prompt,
            prompt_token_ids,
            arrived_at=now if arrived_at is None else arrived_at,
            opened_at=now,
            answers=[None] * sampling.n,
            prompt_parts=None if sampling.prompt_logprobs is None else [],
        )
        stop_ids = stop_ids_of(sampling, eos_token_ids)
        each = [replace(sampling, n=1, seed=_wrapped(sampling.seed + i)) for i in range(sampling.n)]
        each[1:] = [replace(other, prompt_logprobs=None) for other in each[1:]]  # the prompt is the same
        return tuple(self._open_one(group, i, one, stop_ids, priority) for i, one in enumerate(each))

    def _open_one(
        self, group: _Group, index: int, sampling: SamplingParams, stop_ids: tuple[int, ...], priority: int
    ) -> Request:
        request = Request(self._next_id, group.prompt_token_ids, sampling, stop_ids, priority)
        self._next_id += 1
        stream = None
        if sampling.stop and self._tokenizer is not None:
            stream = TextStream(self._tokenizer, sampling.stop, sampling.min_tokens, request.prompt_token_ids)
        logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        self._live[request.request_id] = _Sequence(group, index, request, stream, logprobs)
        return request

    def route(self, output: StepOutput) -> Routed:
        """Give every row its tokens, then end what ended."""
        now = self._clock()
        ended = {finished.request_id: finished for finished in output.finished}
        stop: list[int] = []
        for row, request_id in enumerate(output.request_ids):
            sequence = self._live.get(request_id)
            if sequence is None or not output.counts[row] or not sequence.watched:
                continue
            if self._advance(sequence, output, row, now, ended.get(request_id)) and request_id not in ended:
                stop.append(request_id)
        if output.prompt_logprobs is not None:
            self._collect_prompts(output)
        routed = Routed([], stop)
        for finished in output.finished:
            group = self._end(finished, now)
            if group is not None:
                routed.finished.append(group)
        return routed

    def _advance(
        self, sequence: _Sequence, output: StepOutput, row: int, now: float, finished: Finished | None
    ) -> bool:
        """Tokens of one row; returns whether they completed a stop string."""
        if sequence.first_at is None:
            sequence.first_at = now
            if sequence.group.first_at is None:
                sequence.group.first_at = now
        begin = row * output.width
        tokens = output.tokens[begin : begin + output.counts[row]]
        if sequence.logprobs is not None and output.logprobs is not None:
            sequence.logprobs += row_logprobs(output.logprobs, row, tokens, sequence.request.sampling.logprobs or 0)
        if sequence.stream is None or sequence.stream.stopped:
            return False
        if finished is not None and _ended_by_id(sequence.request, finished):
            tokens = tokens[:-1]  # a stop id is no text
        for token in tokens:
            sequence.stream.push(token)
        sequence.stopped_at = now if sequence.stream.stopped else None
        return sequence.stream.stopped

    def _collect_prompts(self, output: StepOutput) -> None:
        """Rows whose chunk was scored; entries are made at the end, all at once."""
        for request_id, part in zip(output.request_ids, output.prompt_logprobs, strict=True):
            sequence = self._live.get(request_id)
            if part is not None and sequence is not None and sequence.group.prompt_parts is not None:
                sequence.group.prompt_parts.append(part)

    def _end(self, finished: Finished, now: float) -> RequestOutput | None:
        """Close one sequence; returns the whole answer when it was the last of its group."""
        sequence = self._live.pop(finished.request_id, None)
        if sequence is None:
            return None
        group, completion = sequence.group, self._complete(sequence, finished)
        group.answers[sequence.index] = completion
        if sequence.first_at is not None and len(completion.token_ids) > 1:
            last_at = now if sequence.stopped_at is None else sequence.stopped_at
            group.gaps.append((last_at - sequence.first_at) / (len(completion.token_ids) - 1))
        answers = [answer for answer in group.answers if answer is not None]
        if len(answers) < len(group.answers):
            return None
        timing = Timing(
            queued=group.opened_at - group.arrived_at,
            ttft=None if group.first_at is None else group.first_at - group.opened_at,
            tpot=sum(group.gaps) / len(group.gaps) if group.gaps else None,
            e2e=now - group.arrived_at,
        )
        scores = None if group.prompt_parts is None else prompt_logprobs(group.prompt_token_ids, group.prompt_parts)
        return RequestOutput(group.key, group.prompt, group.prompt_token_ids, tuple(answers), timing, scores)

    def _complete(self, sequence: _Sequence, finished: Finished) -> Completion:
        request, reason, token_ids = sequence.request, finished.reason, finished.token_ids
        if sequence.stream is not None:
            if reason in (FinishReason.STOP, FinishReason.LENGTH):  # the rest of one that was cut short tells no end
                sequence.stream.finish()
            text = sequence.stream.text
            if sequence.stream.stopped:  # even if it ran into its length meanwhile: a serial engine would have stopped
                reason, token_ids = FinishReason.STOP, token_ids[: sequence.stream.kept]
        elif self._tokenizer is not None:
            shown = token_ids[:-1] if _ended_by_id(request, finished) else token_ids
            text = self._tokenizer.decode(shown, request.prompt_token_ids)
        else:
            text = ""
        logprobs = None if sequence.logprobs is None else tuple(sequence.logprobs[: len(token_ids)])
        seed = request.sampling.seed or 0
        detail = finished.detail if reason is finished.reason else ""
        return Completion(sequence.index, text, token_ids, reason, seed, logprobs, detail)


def stop_ids_of(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Everything that ends a request on the device, each once. Raises RequestError when a slot cannot hold them."""
    ids = tuple(dict.fromkeys((*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids)))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"{len(ids)} stop token ids, the model's {len(eos_token_ids)} eos ids included, but at most "
            f"{MAX_STOP_TOKEN_IDS} are allowed"
        )
    return ids


def drawn_seed(base_seed: int, key: object) -> int:
    """The seed of a request that named none: a function of the run's seed and the request's own id.

    So it does not depend on the order of requests, nor on which of them an earlier run had finished. 0 <= seed < 2**63.
    """
    digest = blake2b(f"{base_seed}\x00{type(key).__name__}\x00{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _wrapped(seed: int) -> int:
    """``seed`` as a signed 64-bit number."""
    return (seed + 2**63) % 2**64 - 2**63


def _ended_by_id(request: Request, finished: Finished) -> bool:
    """Whether the last token is the stop id that ended the request (rather than a stop string, or a length)."""
    return (
        finished.reason is FinishReason.STOP
        and bool(finished.token_ids)
        and finished.token_ids[-1] in request.stop_token_ids
    )
