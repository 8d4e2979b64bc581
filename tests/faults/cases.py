"""What is injected, where, and what must follow: twelve faults, three phases, every rank of four.

Knows: the cases, their order, which dozen of them a seed picks, what each must lead to.
Does not know: how a fault is made (rank.py), how a job is run and looked at (job.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WORLD = 4
LIMIT = 3.0  # seconds without progress that end a job in these tests: --control-timeout-s
LOAD_LIMIT = 6.0  # the same while loading, where it is half an hour otherwise
AFTER_DEATH = 5.0  # the promise: seconds from a death to the end of the job
AFTER_HANG = 5.0  # and from the limit of a hang


class Fault(StrEnum):
    KILL = "SIGKILL"
    SEGV = "SIGSEGV"
    EXIT = "exit(0)"
    MEMORY = "MemoryError"
    OTHER = "other collective"
    EXTRA = "extra collective"
    DISK = "full disk"
    STOP = "SIGSTOP"
    STALL = "engine stalls"
    HANG = "device stalls"
    HELD = "held interpreter"
    SLOW = "slow"


class Phase(StrEnum):
    LOAD = "load"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Case:
    fault: Fault
    phase: Phase
    rank: int

    def __str__(self) -> str:
        return f"{self.fault.value.replace(' ', '-')}:{self.phase.value}:{self.rank}"

    @property
    def ends_job(self) -> bool:
        """A slow rank does not, nor does a disk that is full for a rank which has nothing to write."""
        return self.fault is not Fault.SLOW and not (self.fault is Fault.DISK and self.rank != 0)

    @property
    def limit(self) -> float:
        """Seconds that the rank may stand still before it is given up; 0 when it does not stand still."""
        if self.fault is Fault.STOP:  # a stopped process is known as such while it loads, too
            return LIMIT
        if self.fault in (Fault.STALL, Fault.HANG, Fault.HELD):
            return LOAD_LIMIT if self.phase is Phase.LOAD else LIMIT
        return 0.0

    @property
    def promised(self) -> float:
        """Seconds from the fault to the end of the job."""
        return self.limit + AFTER_HANG if self.limit else AFTER_DEATH

    @property
    def survivors(self) -> tuple[int, ...]:
        """Ranks that must leave a bundle. The other may, as far as it is alive and can write."""
        return tuple(rank for rank in range(WORLD) if rank != self.rank)


# While a rank loads, half a minute is allowed to whoever holds the interpreter: too long to try.
ALL = tuple(
    Case(fault, phase, rank)
    for fault in Fault
    for phase in Phase
    for rank in range(WORLD)
    if (fault, phase) != (Fault.HELD, Phase.LOAD)
)


def dozen(seed: int) -> tuple[Case, ...]:
    """One case of each fault, each at another phase and rank; twelve seeds in a row are all cases."""
    of_each = [[case for case in ALL if case.fault is fault] for fault in Fault]
    return tuple(cases[(5 * seed + 7 * number) % len(cases)] for number, cases in enumerate(of_each))
