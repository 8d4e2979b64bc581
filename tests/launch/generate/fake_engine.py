"""An engine without a model: a request's tokens are a function of prompt and seed, and come in an unreliable order.

It keeps the promises of EngineProtocol and uses its freedoms: rows advance at random, several tokens at a time, a
cancel takes effect some steps late, a stop string's victim may end by length meanwhile, nothing may land in a step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from types import TracebackType

from runtime.config import EngineConfig
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams


@dataclass(frozen=True)
class FakeModel:
    vocab_size: int = 360
    max_model_len: int = 64
    eos_token_ids: tuple[int, ...] = (0,)
    quantization: str | None = None

    def lacks_memory_for(self, sampling: SamplingParams) -> str | None:
        return None


def scripted_token(request: Request, position: int, vocab_size: int) -> int:
    """The token at a place of an answer; about one in forty is the eos id 0."""
    seed = request.sampling.seed
    text = f"{tuple(request.prompt_token_ids)}/{seed}/{position}"
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    return 0 if number % 40 == 0 else number // 40 % vocab_size


def serial_answer(request: Request, model: FakeModel) -> tuple[tuple[int, ...], FinishReason]:
    """All tokens of a request, as an engine without stop strings generates them."""
    tokens: list[int] = []
    room = model.max_model_len - len(request.prompt_token_ids)
    for position in range(min(request.sampling.max_tokens, room)):
        tokens.append(scripted_token(request, position, model.vocab_size))
        if tokens[-1] in request.stop_token_ids and len(tokens) >= request.sampling.min_tokens:
            return tuple(tokens), FinishReason.STOP
    return tuple(tokens), FinishReason.LENGTH


@dataclass
class _Running:
    request: Request
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """See the module's docstring. ``on_step`` is called with the step's number before it is made."""

    is_leader = True
    compiling = 0

    def __init__(
        self,
        config: EngineConfig,
        model: FakeModel | None = None,
        *,
        seed: int = 0,
        lag: int = 3,
        width: int = 1,
        on_step: Callable[[int], None] = lambda step: None,
        reject: Callable[[Request], str] = lambda request: "",
        fail: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        self.config = config
        self.model_config = model or FakeModel()
        self.stopped = False
        self.closed = False
        self.followed = False
        self.most_live = 0
        self.added: list[Request] = []
        self.resets: list[int] = []  # of the prefix cache: how many answers had been added before each
        self._ids: set[int] = set()
        self._random = random.Random(seed)
        self._lag, self._width = lag, width
        self._on_step, self._reject, self._fail = on_step, reject, fail
        self._steps = count()
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._cancels: list[tuple[int, int, FinishReason]] = []
        self._ended: list[Finished] = []
        self._now = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def slack(self) -> float:
        return 0.0

    @property
    def counters(self) -> Mapping[str, int | float]:
        return {"steps": self._now, "chained_steps": self._now - 1, "chain_breaks{start}": 1, "ghost_rows": 2}

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True

    def add(self, request: Request) -> None:
        assert not self.stopped
        for one in request.answers():
            assert one.request_id not in self._ids, "request ids are new"
            self._ids.add(one.request_id)
            self.added.append(one)
            reason = self._reject(one)
            if reason:
                self._ended.append(Finished(one.request_id, FinishReason.REJECTED, (), reason))
            else:
                self._waiting.append(one)
        self.most_live = max(self.most_live, len(self._waiting) + len(self._running))

    def cancel(self, request_id: int, reason: FinishReason) -> None:
        self._cancels.append((self._now + self._lag, request_id, reason))

    def reset_prefix_cache(self) -> None:
        self.resets.append(len(self.added))

    def bind_thread(self) -> None:
        pass

    def wait(self, ready: Callable[[float], bool], timeout: float) -> None:
        ready(timeout)

    def stop(self) -> None:
        self.stopped = True

    def follow(self) -> None:
        self.followed = True

    def step(self) -> StepOutput:
        assert not self.stopped
        self._now = next(self._steps)
        self._on_step(self._now)
        self._apply_cancels()
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.popleft()
            self._running[request.request_id] = _Running(request)
        rows = [r for r in self._running.values() if self._random.random() < 0.7]
        self._random.shuffle(rows)
        ids, tokens, counts = [], [], []
        for running in rows:
            fresh = self._advance(running)
            ids.append(running.request.request_id)
            tokens += [*fresh, *[-7] * (self._width - len(fresh))]
            counts.append(len(fresh))
        for ghost in range(self._random.randrange(2)):
            ids.append(-1)
            tokens += [ghost] * self._width
            counts.append(self._random.randrange(2))
        ended, self._ended = self._ended, []
        return StepOutput(self._now, ids, tokens, counts, self._width, tuple(ended))

    def _advance(self, running: _Running) -> list[int]:
        request = running.request
        if self._fail(request):
            self._end(running, FinishReason.ERROR)
            return []
        answer, reason = serial_answer(request, self.model_config)
        begin = len(running.tokens)
        fresh = list(answer[begin : begin + self._random.randint(1, self._width)])
        running.tokens += fresh
        if len(running.tokens) == len(answer):
            self._end(running, reason)
        return fresh

    def _apply_cancels(self) -> None:
        due = [entry for entry in self._cancels if entry[0] <= self._now]
        self._cancels = [entry for entry in self._cancels if entry[0] > self._now]
        for _, request_id, reason in due:
            for request in [r for r in self._waiting if r.request_id == request_id]:
                self._waiting.remove(request)
                self._ended.append(Finished(request_id, reason, ()))
            if request_id in self._running:
                self._end(self._running[request_id], reason)

    def _end(self, running: _Running, reason: FinishReason) -> None:
        del self._running[running.request.request_id]
        self._ended.append(Finished(running.request.request_id, reason, tuple(running.tokens)))
