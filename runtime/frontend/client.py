"""EngineClient: requests in, answers out, one turn of the engine after the other. The one request loop there is.

Knows: how many requests the engine should have at once, what a turn's output means for each of them, how they end.
Does not know: where requests come from, threads (async_engine.py has one), files, command lines, how an engine works.

    client = EngineClient(engine)                                  # on rank 0; the other ranks call engine.follow()
    key = client.submit(PromptRequest("def gcd(a, b):", SamplingParams(max_tokens=64), stream=True))
    while client.live:
        turn = client.turn()                                       # blocks until the oldest step in flight has landed
        for delta in turn.deltas: print(delta.text, end="")
        for output in turn.finished: ...
    client.close()                                                 # every rank takes the same last turn

``prepare`` may be called from any thread. Everything else is for one thread, the one that takes the engine's turns.
``submit`` and ``cancel`` only note what is wanted: the next ``turn`` informs the engine.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from runtime.frontend.engine_protocol import EngineProtocol
from runtime.frontend.output_processor import OutputProcessor, drawn_seed
from runtime.frontend.outputs import Delta, RequestOutput
from runtime.frontend.prompt_text import prompt_ids
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import (
    CheckedRequest,
    RequestError,
    checked_priority,
    checked_prompt,
    checked_sampling,
    fitted,
    stop_ids_of,
)
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, SamplingParams, packed

READ_SECONDS = 0.02  # about a decode step: many short texts, or one that is long


@dataclass(slots=True)
class Batch:
    """Requests that came as one: together they have at most so many answers with the engine, and so many tokens of KV
    cache at their longest. One alone may have more tokens."""

    most_answers: int
    most_tokens: int
    answers: int = 0  # with the engine, or about to go there
    tokens: int = 0
    behind: deque[CheckedRequest] = field(default_factory=deque)  # not yet, in order

    def has_room(self, request: CheckedRequest) -> bool:
        answers, tokens = self.answers + request.sampling.n, self.tokens + _most_tokens(request)
        return not self.answers or (answers <= self.most_answers and tokens <= self.most_tokens)


@dataclass(slots=True)
class _Part:
    """A request of a batch that its batch has let go to the engine. ``left``: answers that have not ended."""

    batch: Batch
    request: CheckedRequest
    left: int


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """What a caller asks for: one prompt and how its ``sampling.n`` answers are drawn.

    ``prompt``: a text, or token ids. ``key``: the caller's own name for it, which its deltas and its output carry; no
    two unfinished requests have the same, and None takes a number. ``priority``: smaller ones run earlier. ``stream``:
    deltas are wanted, not only the whole answer. ``text``: where ``prompt`` is token ids, the text they were made from.
    ``arrived_at``: when it came, by the client's clock; None is when it is submitted. ``apart``, without a key: each
    answer has a separate output and deltas, as if it were a request; their keys are the numbers from the returned
    one on. Until the first token they are cancelled together. ``batch``: what it is a part of.
    """

    prompt: str | Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    key: Hashable = None
    priority: int = 0
    stream: bool = False
    text: str | None = None
    arrived_at: float | None = None
    apart: bool = False
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A PromptRequest that was tokenised and checked (``EngineClient.prepare``): handing it over costs little."""

    request: PromptRequest
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    priority: int


class Turn(NamedTuple):
    """What one turn of the engine brought. ``at``: when, by the client's clock; ``step``: the columns it came in."""

    at: float
    step: StepOutput
    deltas: list[Delta]
    finished: list[RequestOutput]


class EngineIdle(RuntimeError):
    """The engine has nothing to do, but requests that it was given have not ended: a fault of the engine."""


class EngineStopped(RuntimeError):
    """The engine takes no more requests: it was closed, or it failed; then ``__cause__`` says of what."""


class EngineClient:
    """See the module's docstring.

    ``tokenizer``: None takes that of the model's folder, where it has one; TokenizerError if that cannot be read.
    ``text`` False leaves texts empty, needs no tokenizer, and makes a turn cost next to nothing here.
    ``concurrency``: sequences that the engine may have at once; by default as many as keep it busy (``capacity_of``).
    Its end is the engine's: EngineStopped for a client over one that was stopped.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        tokenizer: Tokenizer | None = None,
        *,
        text: bool = True,
        concurrency: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check_running(engine)
        if tokenizer is None and text:
            tokenizer = Tokenizer.if_any(engine.config.model)
        self.engine = engine
        self.tokenizer = tokenizer if text else None
        self.concurrency = concurrency
        self.capacity = capacity_of(engine) if concurrency is None else concurrency
        self._model = engine.model_config
        self._clock = clock
        self._outputs = OutputProcessor(self.tokenizer, clock)
        self._waiting: dict[int, CheckedRequest] = {}  # by its first answer's id: not with the engine yet
        self._queue: list[tuple[int, int]] = []  # a heap of their priorities and ids, and of some that were cancelled
        self._parts: dict[int, _Part] = {}  # by each of its answers' ids
        self._queued = 0  # answers of those that wait
        self._most_not_begun = engine.config.max_waiting
        self._answers: dict[Hashable, range] = {}  # request ids of each unfinished request's answers
        self._cancelled: list[Finished] = []  # before they reached the engine
        self._closed = False

    # ---- requests ----

    def prepare(self, request: PromptRequest) -> PreparedPrompt:
        """Tokenise and check. Takes as long as the prompt is long; safe in any thread. Raises RequestError."""
        if not isinstance(request, PromptRequest):
            raise RequestError(f"the request is a {type(request).__name__}, but must be a PromptRequest")
        model, sampling = self._model, checked_sampling(request.sampling, self._model.vocab_size)
        ids = self._encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        prompt = packed(checked_prompt(ids, model.vocab_size, model.max_model_len))
        if not isinstance(request.prompt, str):
            request = replace(request, prompt=prompt)  # as long as it waits, these ids are all that is kept
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and there is none")
        stops = stop_ids_of(sampling, model.eos_token_ids)
        sampling = fitted(sampling, len(prompt), model)
        return PreparedPrompt(request, prompt, sampling, stops, checked_priority(request.priority))

    def _encode(self, text: str) -> Sequence[int]:
        if self.tokenizer is None:
            raise RequestError("the prompt is a text, but there is no tokenizer (tokenizer.json): give token ids")
        return prompt_ids(self.tokenizer, text, self._model.max_model_len)

    def submit(self, request: PromptRequest | PreparedPrompt) -> Hashable:
        """Take a request; returns its key. It waits here, by priority, until the engine has room for it.

        A request without a seed gets one from EngineConfig.seed and its key, so that a run can be repeated. Raises
        RequestError, also for a key that is in use, and EngineStopped after ``close``.
        """
        _check_running(self.engine)
        prepared = request if isinstance(request, PreparedPrompt) else self.prepare(request)
        asked, sampling = prepared.request, prepared.sampling
        _check_key_and_arrival(asked)
        while asked.key is None and self._outputs.next_id in self._answers:
            self._outputs.next_id += 1  # a caller chose this number for a key
        key = self._outputs.next_id if asked.key is None else asked.key
        if key in self._answers:
            raise RequestError(f"key {key!r} is in use by a request that has not ended")
        if sampling.seed is None:
            sampling = replace(sampling, seed=drawn_seed(self.engine.config.seed, str(key)))
        opened = self._outputs.open(
            key,
            prepared.prompt_token_ids,
            sampling,
            prompt=asked.prompt if isinstance(asked.prompt, str) else asked.text,
            stop_token_ids=prepared.stop_token_ids,
            priority=prepared.priority,
            arrived_at=asked.arrived_at,
            stream=asked.stream,
            apart=asked.apart,
            model=self._model,
        )
        if asked.apart:
            self._answers.update((one, range(one, one + 1)) for one in opened.answer_ids)
        else:
            self._answers[key] = opened.answer_ids
        self._queued += opened.sampling.n
        self._waiting[opened.request_id] = opened
        if asked.batch is None:
            heapq.heappush(self._queue, (opened.priority, opened.request_id))
        else:
            asked.batch.behind.append(opened)
            self._let_go(asked.batch)
        return key

    def _let_go(self, batch: Batch) -> None:
        """Into the queue, as many of a batch as may be there at once."""
        while batch.behind:
            request = batch.behind[0]
            if request.request_id in self._waiting:  # not cancelled
                if not batch.has_room(request):
                    return
                batch.answers += request.sampling.n
                batch.tokens += _most_tokens(request)
                part = _Part(batch, request, request.sampling.n)
                self._parts.update(dict.fromkeys(request.answer_ids, part))
                heapq.heappush(self._queue, (request.priority, request.request_id))
            batch.behind.popleft()

    def _end_part(self, answer_id: int) -> None:
        part = self._parts.pop(answer_id, None)
        if part is None:
            return
        batch = part.batch
        part.left -= 1
        batch.answers -= 1
        if not part.left:  # until then they share the prompt
            batch.tokens -= _most_tokens(part.request)
        self._let_go(batch)

    def cancel(self, *keys: Hashable, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End requests soon, as CANCELLED, or as STOP where a caller that has the text found a stop string in it.

        Their outputs come in later turns; unknown and ended keys are ignored. Costs the same however many others wait.
        """
        self._cancel([part for key in keys for part in self._answers.get(key, ())], reason)

    def cancel_all(self, *, unbegun: bool = False) -> None:
        """``cancel`` every request; ``unbegun``: only answers without a single token yet."""
        self._cancel(self._outputs.not_begun() if unbegun else self._outputs.live_ids())

    def _cancel(self, request_ids: Iterable[int], reason: FinishReason = FinishReason.CANCELLED) -> None:
        wanted = set(request_ids)
        waiting: set[int] = set()  # of a request that waits here all answers are wanted, or none
        for request_id in wanted:
            request = self._waiting.pop(request_id, None)
            if request is not None:
                waiting.update(request.answer_ids)
        if waiting:
            if len(self._queue) > 2 * len(self._waiting):  # rarely: each sweep has as much to drop as it keeps
                self._queue = [entry for entry in self._queue if entry[1] in self._waiting]
                heapq.heapify(self._queue)
            self._queued -= len(waiting)
            self._cancelled += [Finished(each, reason, ()) for each in sorted(waiting)]
        for request_id in sorted(wanted - waiting):
            self.engine.cancel(request_id, reason)

    def reset_prefix_cache(self) -> None:
        """As vLLM's: requests from now on hit nothing older; what runs keeps what it has."""
        self.engine.reset_prefix_cache()

    # ---- room ----

    @property
    def live(self) -> int:
        """Requests that were submitted and whose output no turn has returned yet."""
        return len(self._answers)

    @property
    def waiting(self) -> int:
        """Answers that wait here, not in the engine."""
        return self._queued

    @property
    def sequences(self) -> int:
        """Answers that have not ended: ``n`` of each live request."""
        return self._outputs.live

    @property
    def not_begun(self) -> int:
        """Those of them without a single token, wherever they wait."""
        return self._outputs.waiting

    def has_room(self, sequences: int = 1) -> bool:
        """Whether a request of so many answers would go to the engine next turn; always true when nothing is live.

        A caller that reads its requests from somewhere leaves them there until then.
        """
        if not self._answers:
            return True
        outputs = self._outputs  # what was submitted since the last turn counts: it goes to the engine first
        return outputs.live + sequences <= self.capacity and outputs.waiting < self._most_not_begun

    # ---- turns ----

    def turn(self) -> Turn:
        """Hand over what the engine has room for, and take one turn of it.

        Blocks until the oldest step in flight has landed, which is a step's time while anything runs. Every submitted
        request is in ``finished`` of exactly one turn. Raises EngineStopped after ``close``, and whatever the engine
        raises: then it is lost.
        """
        _check_running(self.engine)
        self._feed()
        output = self.engine.step()
        at = self._clock()
        if self._cancelled:
            ended, self._cancelled = tuple(self._cancelled), []
            output = output._replace(finished=ended + tuple(output.finished))
        routed = self._outputs.route(output, at)
        for request_id in routed.stop:
            self.engine.cancel(request_id, FinishReason.STOP)
        for done in routed.finished:
            for answer_id in self._answers.pop(done.key):
                self._end_part(answer_id)
        return Turn(at, output, routed.deltas, routed.finished)

    def _feed(self) -> None:
        """As many as keep the engine busy: others wait here, where order and end cost less than on every rank.

        All answers of a request go together, so that its prompt is sent and computed once. Those that wait for their
        grammars keep nothing busy, nor others waiting.
        """
        queue, outputs = self._queue, self._outputs
        while queue and outputs.live - self._queued - self.engine.compiling < self.capacity:
            if outputs.waiting - self._queued >= self._most_not_begun:
                return
            _, request_id = heapq.heappop(queue)
            request = self._waiting.pop(request_id, None)
            if request is None:  # cancelled
                continue
            self._queued -= request.sampling.n
            outputs.handed_over(request_id)
            self.engine.add(request)

    def run(self, requests: Iterable[PromptRequest | PreparedPrompt] = ()) -> Iterator[Turn]:
        """Turns until ``requests``, taken one by one as there is room for them, and all submitted ones have ended.

        No more are taken before a turn than READ_SECONDS allow, or the device would wait while texts are tokenised.
        Raises EngineIdle when the engine has lost one of them, and whatever ``submit`` and ``turn`` raise.
        """
        source = iter(requests)
        exhausted = False
        while True:
            read_until = time.monotonic() + READ_SECONDS
            while not exhausted and self.has_room():
                request = next(source, None)
                if request is None:
                    exhausted = True
                else:
                    self.submit(request)
                if time.monotonic() >= read_until:
                    break
            if not self._answers:
                return
            yield self.turn()
            if self._answers and not (self._waiting or self._cancelled or self.engine.has_work):
                raise EngineIdle(f"the engine is idle, but {self.live} requests have not ended")

    def drain(self) -> None:
        """Take the turns that are left when no request is: those of steps that were in flight when the last ended."""
        while self.engine.has_work:
            self.engine.step()

    def wait(self, ready: Callable[[float], bool], timeout: float) -> None:
        """Instead of a turn while nothing is live: blocks until ``ready(seconds)``, which waits up to that long for new
        work, is true, and at most ``timeout`` seconds. The other ranks are kept informed that all is well."""
        self.engine.wait(ready, timeout)

    def close(self) -> None:
        """Agree on the end: every follower's ``follow`` returns. What has not ended is dropped. Idempotent."""
        if not self._closed:
            self._closed = True
            self.engine.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """After an error the engine is left as it is: its own end informs the other ranks."""
        if error is None or isinstance(error, RequestError):
            self.close()


def capacity_of(engine: EngineProtocol) -> int:
    """Sequences to keep with the engine: those that run, and as many as may take over from them."""
    config = engine.config
    return config.data_parallel * (config.max_num_seqs + min(config.max_num_seqs, config.max_waiting))


def _most_tokens(request: CheckedRequest) -> int:
    """KV cache of its prompt and its longest answers."""
    return len(request.prompt_token_ids) + request.sampling.n * request.sampling.max_tokens


def _check_running(engine: EngineProtocol) -> None:
    """Raises EngineStopped."""
    if engine.stopped:
        raise EngineStopped(
            "this engine was stopped when its client closed: keep one client for all requests, or open another engine"
        )


def _check_key_and_arrival(request: PromptRequest) -> None:
    """What is used in the engine's own thread. Raises RequestError."""
    try:
        hash(request.key)
    except TypeError:
        raise RequestError(f"key is a {type(request.key).__name__}, but must be hashable") from None
    try:
        str(request.key)  # a seed is drawn from it
    except Exception as error:  # whatever a class of the caller's raises
        raise RequestError(
            f"key is of type {type(request.key).__name__}, but str() of it fails: {error!r:.80}"
        ) from None
    at = request.arrived_at
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at)):
        raise RequestError(f"arrived_at is {at!r:.80}, but must be a time in seconds")
