"""The chain: the steps in flight, and what distinguishes a live row from a ghost.

Knows: the order of launched steps, and how a sequence moves along the transition table (states.py). Does not know: how
rows are chosen (planner.py).

Rules. Everything that decides when something may be reused lives here or in fence.py:
 1. Steps land in the order they were launched, each exactly once, and plan(N) runs when exactly the steps up to
    N-1-D have landed. A step in which nothing could run is void: it has a number and lands like any other.
 2. A sequence that ends leaves the plan at once and its slot's epoch moves on. Rows of it that are still in flight are
    ghosts: their results are dropped.
 3. Slot and blocks are fenced by the last launched step that may touch them. An evicted sequence waits for that step
    before it queues again: its rows in flight stay live and their tokens are kept, not recomputed.
 4. An illegal (state, trigger) raises IllegalTransition, which names both, and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from runtime.schedule.plan import StepPlan
from runtime.schedule.sequence import SequenceState
from runtime.schedule.states import TRANSITIONS, IllegalTransition, Trigger


def advance(sequence: SequenceState, trigger: Trigger) -> None:
    """Move ``sequence`` along the table. Raises IllegalTransition."""
    following = TRANSITIONS[sequence.state].get(trigger)
    if following is None:
        raise IllegalTransition(
            f"request {sequence.request.request_id}: {trigger.value!r} is not possible while {sequence.state.value}"
        )
    sequence.state = following


class Flight:
    """A launched step: its plan (None: void), the sequences of its rows, and the slots' version, as they were then."""

    __slots__ = ("plan", "rows", "slot_version", "step")

    def __init__(self, step: int, plan: StepPlan | None, rows: tuple[SequenceState, ...], slot_version: int) -> None:
        self.step = step
        self.plan = plan
        self.rows = rows
        self.slot_version = slot_version


class Chain:
    """The steps in flight, oldest first, never more than depth + 1."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.step = 0  # the number of the next step to launch
        self._flights: deque[Flight] = deque()
        self.real = 0  # flights that are not void

    def __len__(self) -> int:
        return len(self._flights)

    def launch(self, flight: Flight) -> None:
        """Raises ChainError where a plan was made with more, or fewer, steps landed than those up to N-1-D (law 1)."""
        expected = min(self.depth, flight.step)
        if len(self._flights) != expected:
            raise ChainError(
                f"step {flight.step} was planned with {len(self._flights)} steps in flight; at chain depth "
                f"{self.depth} it is planned with {expected}: land a step once D newer ones are launched, and then"
            )
        self._flights.append(flight)
        self.step = flight.step + 1
        self.real += flight.plan is not None

    def land(self, step: int) -> Flight:
        """Remove the oldest flight. Raises ChainError if ``step`` is not it."""
        if not self._flights or self._flights[0].step != step:
            due = self._flights[0].step if self._flights else "nothing"
            raise ChainError(f"step {step} cannot land: next to land is {due}")
        flight = self._flights.popleft()
        self.real -= flight.plan is not None
        return flight

    def tokens_in_flight(self) -> Iterator[tuple[SequenceState, int]]:
        """For each row in flight that is to give tokens: its sequence, and how many at most."""
        for flight in self._flights:
            plan = flight.plan
            if plan is not None:
                decode_rows = plan.decode_rows
                for sequence in flight.rows[:decode_rows]:
                    yield sequence, plan.width
                for row, sequence in enumerate(flight.rows[decode_rows:], decode_rows):
                    if plan.draws(row):
                        yield sequence, 1

    def landed_after(self, step: int) -> bool:
        """Whether ``step`` has landed already; the one that is being planned has not."""
        return step < (self._flights[0].step if self._flights else self.step)


class ChainError(RuntimeError):
    """The engine broke the order plan, launch, land."""
