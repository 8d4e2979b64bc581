"""Host time of an engine's turns, by phase, measured from outside.

Knows: the methods that the loop calls, and which phase each of them is. Does not know: how a phase works.
An engine that is not measured reads no clock in a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.engine import Engine
from runtime.schedule.plan import StepOutput

WORK = ("exchange", "plan", "launch", "land")


@dataclass(slots=True)
class Turn:
    """One turn: nanoseconds by phase, host-to-device bytes and copies."""

    spent: dict[str, int]
    copied_bytes: int
    copies: int


class TurnClock:
    """Times the phases of an engine's turns by wrapping the methods that the loop calls."""

    def __init__(self, engine: Engine) -> None:
        self.turns: list[Turn] = []
        self._staging = engine.executor.staging.counters
        self._copied = (self._staging.host_to_device_bytes, self._staging.copies)
        self._spent: dict[str, int] = {}
        for owner, method, phase in (
            (engine, "step", "turn"),
            (engine.control, "exchange", "exchange"),
            (engine.control, "agree_max", "exchange"),  # with other groups
            (engine.scheduler, "plan", "plan"),
            (engine.executor, "launch", "launch"),
            (engine.executor, "take", "wait"),
            (engine.scheduler, "land", "land"),
        ):
            setattr(owner, method, self._timed(phase, getattr(owner, method)))

    def _timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        def timed(*arguments: Any) -> Any:
            began = clock()
            result = method(*arguments)
            self._spent[phase] = self._spent.get(phase, 0) + clock() - began
            return result

        return timed

    def end_turn(self, _: StepOutput) -> None:
        """To be called after each turn."""
        copied_bytes, copies = self._staging.host_to_device_bytes, self._staging.copies
        self.turns.append(Turn(self._spent, copied_bytes - self._copied[0], copies - self._copied[1]))
        self._spent = {}
        self._copied = (copied_bytes, copies)

    @property
    def steady(self) -> list[Turn]:
        """Turns in which one step was launched and another one landed."""
        return [turn for turn in self.turns if {"plan", "launch", "land"} <= turn.spent.keys()]
