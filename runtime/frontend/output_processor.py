"""From the engine's columns of tokens to finished answers: one record a running sequence, one group a request.

Knows: which sequences belong to a request, their text while stop strings need it, when what happened.
Does not know: where requests come from, where answers go, or how the engine works. It does no I/O: what is to be
cancelled is returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from runtime.frontend.answer_text import TextStream
from runtime.frontend.engine_protocol import ModelFacts
from runtime.frontend.logprobs import prompt_logprobs, row_logprobs
from runtime.frontend.outputs import Completion, Delta, RequestOutput, Timing, TokenLogprob
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import CheckedRequest, RequestError, stop_ids_of
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams, packed

if TYPE_CHECKING:
    from runtime.execute.sampling.logprobs import PromptLogprobs


class Routed(NamedTuple):
    """What one step output led to: ``stop`` are request ids that hit a stop string and should be cancelled as STOP,
    ``deltas`` what streamed requests gained."""

    finished: list[RequestOutput]
    stop: list[int]
    deltas: list[Delta]


@dataclass(slots=True)
class _Group:
    """A request and its ``n`` answers, as far as they have come."""

    key: Hashable
    prompt: str | None
    prompt_token_ids: Sequence[int]
    arrived_at: float
    opened_at: float
    answers: list[Completion | None]
    prompt_parts: list[PromptLogprobs] | None  # None: the prompt's log-probabilities are not wanted
    handed_over_at: float | None = None  # None: when it was opened
    first_at: float | None = None
    apart: bool = False  # no entries are made of ``prompt_parts``
    gaps: list[float] = field(default_factory=list)  # mean seconds between tokens, one entry an answer that ended


@dataclass(slots=True)
class _Sequence:
    """One answer that is being generated."""

    group: _Group
    index: int
    request: Request
    text: TextStream | None  # only where stop strings or deltas need the text before the end
    logprobs: list[TokenLogprob] | None
    streamed: bool  # whether deltas are wanted
    first_at: float | None = None
    stopped_at: float | None = None  # when its stop string was found; the engine ends it some steps later
    sent: int = 0  # tokens that went out in deltas
    unsent: str = ""  # text that has not

    @property
    def kept(self) -> int:
        """Tokens that its text has taken: after a stop string it takes none."""
        return 0 if self.text is None else self.text.kept

    @property
    def simple(self) -> bool:
        """Whether text is all that its tokens are looked at for."""
        return self.text is not None and self.logprobs is None

    @property
    def watched(self) -> bool:
        """Whether its tokens after the first must be looked at one by one."""
        return self.streamed or self.text is not None or self.logprobs is not None


class OutputProcessor:
    """``open`` a request, hand its parts to the engine, ``route`` every step output until the answer comes out.

    ``tokenizer`` None gives empty texts (and refuses stop strings). ``clock`` returns seconds. A row of a step costs
    nothing here unless the caller waits for the first token, or wants a stop string, deltas or log-probabilities.
    """

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self.next_id = 0  # of the next sequence
        self._live: dict[int, _Sequence] = {}
        self._not_begun: dict[int, _Sequence] = {}  # those without a token
        self._watched: dict[int, _Sequence] = {}  # those, and those whose tokens are looked at
        self._plain_rows: Sequence[int] = ()  # the last step's without one of them: later ones have newer ids

    @property
    def live(self) -> int:
        """Sequences that were opened and have not ended."""
        return len(self._live)

    def not_begun(self) -> list[int]:
        """Request ids of live sequences without a single token."""
        return list(self._not_begun)

    @property
    def waiting(self) -> int:
        """How many of them there are."""
        return len(self._not_begun)

    def live_ids(self) -> list[int]:
        return list(self._live)

    def handed_over(self, request_id: int) -> None:
        """The engine gets this one now, later than it was opened: the time that its request was queued ends here."""
        group = self._live[request_id].group
        if group.handed_over_at is None:
            group.handed_over_at = self._clock()

    def open(
        self,
        key: Hashable,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        eos_token_ids: tuple[int, ...] = (),
        stop_token_ids: tuple[int, ...] | None = None,
        priority: int = 0,
        arrived_at: float | None = None,
        stream: bool = False,
        apart: bool = False,
        model: ModelFacts | None = None,
    ) -> CheckedRequest:
        """The request as it is to be added to the engine, with the next ``n`` ids for its answers.

        ``sampling.seed`` must be set.
        ``arrived_at`` is a time of the same clock, by default now. ``stream``: deltas are wanted. ``apart``:
        each answer is an output alone, whose key is its request id; what came of its prompt's log-probabilities is left
        as it is. ``model``: what prompt and sampling were
        checked for, if they were. ``stop_token_ids``: everything that ends it on the device,
        by default worked out from ``sampling`` and ``eos_token_ids``. Raises RequestError for too many of them.
        """
        if sampling.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the model folder has none")
        if sampling.seed is None:
            raise RequestError("the seed is not set: draw one with drawn_seed()")
        now = self._clock()
        stop_ids = stop_ids_of(sampling, eos_token_ids) if stop_token_ids is None else stop_token_ids
        whole = CheckedRequest(self.next_id, packed(prompt_token_ids), sampling, stop_ids, priority, model)
        self.next_id += sampling.n
        for index, request in enumerate(whole.answers()):
            one, text = request.sampling, None
            if apart or not index:
                group = _Group(
                    request.request_id if apart else key,
                    prompt,
                    whole.prompt_token_ids,
                    arrived_at=now if arrived_at is None else arrived_at,
                    opened_at=now,
                    answers=[None] * (1 if apart else sampling.n),
                    prompt_parts=None if one.prompt_logprobs is None else [],
                    apart=apart,
                )
            if (one.stop or stream) and self._tokenizer is not None:
                text = TextStream(self._tokenizer, one.stop, one.min_tokens, group.prompt_token_ids)
            sequence = _Sequence(
                group, 0 if apart else index, request, text, None if one.logprobs is None else [], stream
            )
            for table in (self._live, self._not_begun, self._watched):
                table[request.request_id] = sequence
        return whole

    def route(self, output: StepOutput, now: float | None = None) -> Routed:
        """Give every row its tokens, then end what ended. ``now``: when the output came, by the same clock."""
        now = self._clock() if now is None else now
        routed = Routed([], [], [])
        rows = output.request_ids
        if self._watched and rows != self._plain_rows:
            if self._watched.keys().isdisjoint(rows):
                self._plain_rows = rows
            else:
                self._route_rows(output, now, routed)
        if output.prompt_logprobs is not None:
            self._collect_prompts(output)
        for finished in output.finished:
            self._end(finished, now, routed)
        return routed

    def _route_rows(self, output: StepOutput, now: float, routed: Routed) -> None:
        ended = {finished.request_id: finished for finished in output.finished}
        for row, request_id in enumerate(output.request_ids):
            sequence = self._watched.get(request_id)
            if sequence is None or not output.counts[row]:
                continue
            if sequence.first_at is None:
                self._begin(sequence, now)
                if not sequence.watched:
                    continue
            if output.width == 1 and sequence.simple and request_id not in ended:
                self._advance_simply(sequence, output.tokens[row], now, routed)
                continue
            before = sequence.kept
            if self._advance(sequence, output, row, now, ended.get(request_id)) and request_id not in ended:
                routed.stop.append(request_id)
            if sequence.streamed and request_id not in ended:  # else the end brings what is left
                begin = row * output.width
                fresh = output.tokens[begin : begin + output.counts[row]]
                if sequence.text is not None:
                    fresh = fresh[: sequence.kept - before]
                if fresh:
                    routed.deltas.append(_delta(sequence, tuple(fresh)))

    @staticmethod
    def _advance_simply(sequence: _Sequence, token: int, now: float, routed: Routed) -> None:
        """What most rows of most steps need: the text of one token, and a delta if it is streamed."""
        text = sequence.text
        kept = sequence.kept
        shown = "" if text is None else text.push(token)
        if sequence.kept == kept:  # it has come to a stop string before
            return
        if text is not None and text.stopped:
            sequence.stopped_at = now
            routed.stop.append(sequence.request.request_id)
        if sequence.streamed:
            sequence.sent += 1
            routed.deltas.append(Delta(sequence.group.key, sequence.index, sequence.unsent + shown, (token,)))
            sequence.unsent = ""

    def _begin(self, sequence: _Sequence, now: float) -> None:
        """Its first token is here."""
        sequence.first_at = now
        if sequence.group.first_at is None:
            sequence.group.first_at = now
        del self._not_begun[sequence.request.request_id]
        if not sequence.watched:
            del self._watched[sequence.request.request_id]

    def _advance(
        self, sequence: _Sequence, output: StepOutput, row: int, now: float, finished: Finished | None
    ) -> bool:
        """Tokens of one row; returns whether they completed a stop string."""
        begin, text = row * output.width, sequence.text
        tokens = output.tokens[begin : begin + output.counts[row]]
        if sequence.logprobs is not None and output.logprobs is not None:
            sequence.logprobs += row_logprobs(output.logprobs, row, tokens, sequence.request.sampling.logprobs or 0)
        if text is None or text.stopped:
            return False
        if finished is not None and _ended_by_id(sequence.request, finished):
            tokens = tokens[:-1]  # a stop id is no text
        for token in tokens:
            shown = text.push(token)
            if sequence.streamed:
                sequence.unsent += shown
        sequence.stopped_at = now if text.stopped else None
        return text.stopped

    def _collect_prompts(self, output: StepOutput) -> None:
        """Rows whose chunk was scored; entries are made at the end, all at once."""
        for request_id, part in zip(output.request_ids, output.prompt_logprobs, strict=True):
            sequence = self._live.get(request_id)
            if part is not None and sequence is not None and sequence.group.prompt_parts is not None:
                sequence.group.prompt_parts.append(part)

    def _end(self, finished: Finished, now: float, routed: Routed) -> None:
        """Close one sequence, and the whole answer when it was the last of its group."""
        sequence = self._live.pop(finished.request_id, None)
        if sequence is None:
            return
        self._not_begun.pop(finished.request_id, None)
        self._watched.pop(finished.request_id, None)
        group, completion = sequence.group, self._complete(sequence, finished)
        group.answers[sequence.index] = completion
        if sequence.first_at is not None and len(completion.token_ids) > 1:
            last_at = now if sequence.stopped_at is None else sequence.stopped_at
            group.gaps.append((last_at - sequence.first_at) / (len(completion.token_ids) - 1))
        whole = self._whole(group, now)
        if whole is not None:
            routed.finished.append(whole)
        if sequence.streamed:
            rest = completion.token_ids[sequence.sent :]
            routed.deltas.append(_delta(sequence, rest, completion.finish_reason, whole))

    def _whole(self, group: _Group, now: float) -> RequestOutput | None:
        """The answer, once all of it is there."""
        answers = [answer for answer in group.answers if answer is not None]
        if len(answers) < len(group.answers):
            return None
        began = group.opened_at if group.handed_over_at is None else group.handed_over_at
        timing = Timing(
            queued=began - group.arrived_at,
            ttft=None if group.first_at is None else group.first_at - began,
            tpot=sum(group.gaps) / len(group.gaps) if group.gaps else None,
            e2e=now - group.arrived_at,
        )
        output = RequestOutput(group.key, group.prompt, group.prompt_token_ids, tuple(answers), timing)
        if group.prompt_parts is None:
            return output
        if group.apart:
            return replace(output, prompt_parts=tuple(group.prompt_parts))
        return replace(output, prompt_logprobs=prompt_logprobs(group.prompt_token_ids, group.prompt_parts))

    def _complete(self, sequence: _Sequence, finished: Finished) -> Completion:
        request, reason, token_ids = sequence.request, finished.reason, finished.token_ids
        if sequence.text is not None:
            rest, reason = sequence.text.end(reason)
            sequence.unsent += rest
            text = sequence.text.text
            if sequence.text.stopped:
                token_ids = token_ids[: sequence.text.kept]
        elif self._tokenizer is not None:
            shown = token_ids[:-1] if _ended_by_id(request, finished) else token_ids
            text = self._tokenizer.decode(shown, request.prompt_token_ids)
        else:
            text = ""
        logprobs = None if sequence.logprobs is None else tuple(sequence.logprobs[: len(token_ids)])
        seed = request.sampling.seed or 0
        detail = finished.detail if reason is finished.reason else ""
        rounds, accepted = finished.rounds, finished.accepted
        return Completion(sequence.index, text, token_ids, reason, seed, logprobs, detail, rounds, accepted)


def _delta(
    sequence: _Sequence,
    token_ids: tuple[int, ...],
    reason: FinishReason | None = None,
    output: RequestOutput | None = None,
) -> Delta:
    """Its next tokens, with the text that may be shown by now."""
    begin = sequence.sent
    sequence.sent = end = begin + len(token_ids)
    text, sequence.unsent = sequence.unsent, ""
    logprobs = None if sequence.logprobs is None else tuple(sequence.logprobs[begin:end])
    return Delta(sequence.group.key, sequence.index, text, token_ids, logprobs, reason, output)


def drawn_seed(base_seed: int, key: object) -> int:
    """The seed of a request that named none: a function of the run's seed and the request's own id.

    So it does not depend on the order of requests, nor on which of them an earlier run had finished. 0 <= seed < 2**63.
    """
    text = f"{base_seed}\x00{type(key).__name__}\x00{key}"
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()  # a file's name may have surrogates
    return int.from_bytes(digest, "little") >> 1


def _ended_by_id(request: Request, finished: Finished) -> bool:
    """Whether the last token is the stop id that ended the request (rather than a stop string, or a length)."""
    return (
        finished.reason is FinishReason.STOP
        and bool(finished.token_ids)
        and finished.token_ids[-1] in request.stop_token_ids
    )
