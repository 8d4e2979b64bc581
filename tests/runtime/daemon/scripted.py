"""An engine with sessions and without a model: the real scheduler over the device made of lists.

Knows: the order submit, plan, launch, land. Does not know: clients. What it generates is ``complete_alone`` of the
session's engine id and of all that it knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.config import EngineConfig
from runtime.frontend.validation import checked_session, checked_turn
from runtime.schedule.plan import Admit, Branch, Cancel, Continue, Event, Extend, Finished, ResetPrefixCache, StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.fake_device import VOCABULARY, FakeDevice


@dataclass(frozen=True)
class ScriptedModel:
    vocab_size: int = VOCABULARY
    max_model_len: int = 64
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None

    def lacks_memory_for(self, sampling: SamplingParams) -> str | None:
        return None


class ScriptedEngine:
    """``limits`` are those of the scheduler; max_sessions is 6 unless told otherwise."""

    def __init__(self, **limits: Any) -> None:
        sizes = {"rows": 3, "slots": 12, "blocks": 100, "max_sessions": 6, "depth": 2, **limits}
        config = config_with(**sizes)
        self.scheduler = Scheduler(config)
        bounds = config.limits
        self.device = FakeDevice(config.blocks, bounds.block_size, bounds.slots, bounds.max_blocks)
        windows = {"method": "ngram", "num_speculative_tokens": bounds.width - 1} if bounds.width > 1 else None
        self.config = EngineConfig(
            model="none",
            device="cpu",
            max_num_seqs=bounds.rows,
            max_sessions=config.max_sessions,
            chain_depth=bounds.depth,
            horizon=0,
            speculative_config=windows,
        )
        self.model_config = ScriptedModel(max_model_len=bounds.max_model_len)
        self.stopped = False
        self.steps = 0
        self._events: deque[Event] = deque()
        self._in_flight: deque[int] = deque()

    @property
    def counters(self) -> Mapping[str, int | float]:
        return {"prefill_tokens": self.scheduler.counters.prefill_tokens, "steps": self.steps}

    @property
    def has_work(self) -> bool:
        scheduler = self.scheduler
        return bool(self._events or scheduler.unfinished > scheduler.parked or scheduler.chain.real)

    def start(self, request: Request, quantum: int, *, keep: bool = False) -> None:
        self._events.append(Admit(checked_session(request, quantum, self.model_config), quantum, keep))

    def proceed(self, request_id: int, epoch: int, tokens: int) -> None:
        self._events.append(Continue(request_id, epoch, tokens))

    def extend(self, request_id: int, epoch: int, token_ids: Sequence[int], max_tokens: int, quantum: int) -> None:
        said = checked_turn(token_ids, max_tokens, quantum, self.model_config)
        self._events.append(Extend(request_id, epoch, said, max_tokens, quantum))

    def fork(self, request_id: int, parent: int, *, scored: bool = False) -> None:
        self._events.append(Branch(request_id, parent, scored))

    def reset_prefix_cache(self) -> None:
        self._events.append(ResetPrefixCache())

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._events.append(Cancel(request_id, reason))

    def step(self) -> StepOutput:
        scheduler = self.scheduler
        ended: tuple[Finished, ...] = ()
        while self._events:
            ended += scheduler.submit(self._events.popleft())
        plan = scheduler.plan()
        self.steps += plan is not None
        self.device.launch(plan)
        self._in_flight.append(scheduler.step - 1)
        output = StepOutput(scheduler.step)
        if len(self._in_flight) > scheduler.config.limits.depth:
            output = scheduler.land(self._in_flight.popleft(), self.device.land(scheduler.slots.epochs))
        notices, closed = scheduler.take_notices()
        return output._replace(finished=_all(ended, output.finished, closed), notices=notices)

    def slack(self) -> float:
        return 0.0

    def wait(self, ready: Callable[[float], bool], timeout: float) -> None:
        ready(timeout)

    def stop(self) -> None:
        self.stopped = True

    def check_all_is_back(self) -> None:
        """Nothing is held, running or parked."""
        self.scheduler.check()
        assert (self.scheduler.unfinished, len(self.scheduler.ledger.sessions)) == (0, 0)
        assert self.scheduler.pool.free_count == self.scheduler.config.blocks


def _all(*ended: tuple[Finished, ...]) -> tuple[Finished, ...]:
    return tuple(one for some in ended for one in some)
