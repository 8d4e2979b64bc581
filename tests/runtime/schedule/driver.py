"""The engine's loop over a scheduler and the fake device, one turn at a time, so that a test can look in between.

Knows: the order submit, plan, launch, land. Does not know: what a test wants to see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Unpack

from runtime.schedule.plan import Admit, Cancel, Event, Finished, Pause, Resume, StepOutput, StepPlan
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState
from runtime.schedule.states import State
from tests.runtime.schedule.configs import Limits, config_with
from tests.runtime.schedule.fake_device import VOCABULARY, FakeDevice, complete_alone, snapshots_of, spoil_free_pages
from tests.runtime.schedule.mixed_rules import MixedRules

ENOUGH_TURNS = 500


def prompt_of(length: int, request_id: int = 0) -> tuple[int, ...]:
    """Different for different requests from the first token on."""
    return tuple((7 * request_id + 3 * i + 1) % VOCABULARY for i in range(length))


def ending_by_stop(request_id: int, length: int, after: int) -> tuple[tuple[int, ...], int]:
    """A prompt of ``length`` tokens and a stop id that ends the request with exactly its ``after``-th new token."""
    for last in range(VOCABULARY):
        prompt = (*prompt_of(length - 1, request_id), last)
        tokens, _ = complete_alone(request_id, prompt, (), length + after)
        if tokens.index(tokens[-1]) == after - 1:
            return prompt, tokens[-1]
    raise ValueError(f"no prompt of {length} tokens makes request {request_id} new {after} times")


class Driver:
    """``limits`` replace fields of ROOMY. Keeps everything planned and landed, checks the accounts after every verb,
    and with mixed steps every plan against their rules.
    """

    def __init__(self, **limits: Unpack[Limits]) -> None:
        self.config = config_with(**limits)
        self.scheduler = Scheduler(self.config)
        sizes = self.config.limits
        self.device = FakeDevice(
            self.config.blocks,
            sizes.block_size,
            sizes.slots,
            sizes.max_blocks,
            snapshots=snapshots_of(self.config),
            windows=self.config.windows,
        )
        spoil_free_pages(self.scheduler, self.device)
        self.plans: list[StepPlan | None] = []
        self.outputs: list[StepOutput] = []
        self.finished: dict[int, Finished] = {}
        self._requests: dict[int, Request] = {}
        self._in_flight: deque[int] = deque()
        self._rules = None if self.config.mixed is None else MixedRules(self.scheduler)

    # ---- events ----

    def admit(
        self,
        request_id: int,
        prompt: int | Sequence[int] = 3,
        max_tokens: int = 4,
        stop: int | None = None,
        priority: int = 0,
        n: int = 1,
        prompt_logprobs: int | None = None,
        quantum: int = 0,
        salt: str = "",
    ) -> None:
        """``prompt`` is its tokens, or how many. With a ``quantum`` it is a session that is kept."""
        tokens = prompt_of(prompt, request_id) if isinstance(prompt, int) else prompt
        stops = () if stop is None else (stop,)
        sampling = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=prompt_logprobs, cache_salt=salt)
        request = Request(request_id, tokens, sampling, stops, priority)
        self._requests |= {answer.request_id: answer for answer in request.answers()}
        self.submit(Admit(request, quantum=quantum, keep=quantum > 0))

    def submit(self, event: Event) -> None:
        self._ended(self.scheduler.submit(event))

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.submit(Cancel(request_id, reason))

    def pause(self, request_id: int) -> None:
        self.submit(Pause(request_id))

    def resume(self, request_id: int) -> None:
        self.submit(Resume(request_id))

    def _ended(self, ended: tuple[Finished, ...]) -> None:
        self.scheduler.check()
        for item in ended:
            assert item.request_id not in self.finished, f"request {item.request_id} ended twice"
            self.finished[item.request_id] = item

    # ---- turns ----

    def turn(self) -> StepPlan | None:
        """Plan and launch one step, and land the one that is due."""
        if self._rules is not None:
            self._rules.before()
        plan = self.scheduler.plan()
        if self._rules is not None:
            self._rules.after(plan)
        self.scheduler.check()
        assert plan is None or len(plan.slots) <= self.config.limits.rows, (
            "a step is never wider than memory was sized for"
        )
        self._room_for_rows(plan)
        self.device.launch(plan)
        self.plans.append(plan)
        self._in_flight.append(self.scheduler.step - 1)
        if len(self._in_flight) > self.config.limits.depth:
            self._land()
        return plan

    def _room_for_rows(self, plan: StepPlan | None) -> None:
        """Law 4, at every step: a decode row's blocks hold its last token and its drafts, however far it has come.

        A row that has come to its ``max_length`` is finished on the device and writes nothing more.
        """
        if plan is None:
            return
        for sequence in self.scheduler.chain._flights[-1].rows[: plan.decode_rows]:
            came_to = min(sequence.planned_tokens - plan.width, sequence.max_length - 1)
            assert came_to - 1 + plan.width <= len(sequence.blocks) * self.config.limits.block_size

    def turns(self, count: int) -> list[StepPlan | None]:
        return [self.turn() for _ in range(count)]

    def real_turns(self, count: int) -> list[StepPlan]:
        """The same where none of the steps may be void."""
        plans = [plan for plan in self.turns(count) if plan is not None]
        assert len(plans) == count, "a step was void"
        return plans

    def turns_until(self, state: State, request_id: int) -> None:
        for _ in range(ENOUGH_TURNS):
            if self.state(request_id) is state:
                return
            self.turn()
        raise AssertionError(f"request {request_id} never became {state.value}: {self.state(request_id).value}")

    def _land(self) -> None:
        output = self.scheduler.land(self._in_flight.popleft(), self.device.land(self.scheduler.slots.epochs))
        self.outputs.append(output)
        self._ended(output.finished)

    def finish(self) -> None:
        """Run to the end; every token must be the one that the request gets alone, and everything must come back."""
        for _ in range(ENOUGH_TURNS):
            if not self.scheduler.unfinished:
                break
            self.turn()
        else:
            raise AssertionError(f"{self.scheduler.unfinished} requests did not end in {ENOUGH_TURNS} steps")
        while self.scheduler.chain.real:
            self.turn()  # void, until the last ghosts have landed too
        assert self.scheduler.pool.free_count == self.config.blocks
        assert self.scheduler.slots.free_count == self.config.limits.slots
        assert [pool.free_count for pool in self.scheduler.ledger.windows] == [n for _, n in self.config.windows]
        for request_id, ended in self.finished.items():
            assert ended.token_ids == self.alone(request_id)[: len(ended.token_ids)], f"request {request_id}"
            if ended.reason in (FinishReason.STOP, FinishReason.LENGTH) and not self._stopped_by_host(ended):
                assert ended.token_ids == self.alone(request_id), f"request {request_id}"

    def _stopped_by_host(self, ended: Finished) -> bool:
        return ended.reason is FinishReason.STOP and not self._requests[ended.request_id].stop_token_ids

    # ---- what a test looks at ----

    def alone(self, request_id: int) -> tuple[int, ...]:
        """What this request generates with nobody beside it."""
        request = self._requests[request_id]
        prompt = tuple(request.prompt_token_ids)
        longest = min(len(prompt) + request.sampling.max_tokens, self.config.limits.max_model_len)
        return complete_alone(request_id, prompt, request.stop_token_ids, longest)[0]

    def sequence(self, request_id: int) -> SequenceState:
        return self.scheduler.ledger.sequences[request_id]

    def state(self, request_id: int) -> State:
        sequence = self.scheduler.ledger.sequences.get(request_id)
        return State.ENDED if sequence is None else sequence.state

    def reason(self, request_id: int) -> FinishReason:
        return self.finished[request_id].reason

    def steps_of(self, request_id: int) -> list[int]:
        """The steps whose landing gave the request a token."""
        return [
            output.step
            for output in self.outputs
            for row, count in zip(output.request_ids, output.counts, strict=True)
            if row == request_id and count
        ]
