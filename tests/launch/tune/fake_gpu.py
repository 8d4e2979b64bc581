"""A GPU for `tune` that computes nothing: every candidate's microseconds are made up, and time is a number.

Knows: which candidates run, which break, and how long a measurement takes. Does not know: Triton, CUDA, models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launch.tune.journal import AnyChoice
from launch.tune.plan import Effort, Task
from launch.tune.tuner import Bench, DeviceLost, put
from models.kernels.attention.decode_variant import DecodeShape, DecodeVariant, nearest_variant
from models.kernels.matmul.choice_table import Blas, ChoiceTable, Gemv, LinearShape, Skinny, Wide

FAST, BRIEFLY_FAST = Wide(64, 64, 64, 1, 4, 4, 64), Wide(64, 96, 64, 1, 4, 4, 64)
SLOW, BROKEN = Gemv(1, 1024, 4), Skinny(8, 64, 128, 1, 5, 4, 128)
VARIANT = DecodeVariant(True, 32, 3, 1)
BRIEF: dict[AnyChoice, float] = {BRIEFLY_FAST: 9.8, FAST: 10.0, SLOW: 30.0, Blas(): 12.0, None: 20.0, VARIANT: 18.0}
LASTING: dict[AnyChoice, float] = {**BRIEF, BRIEFLY_FAST: 11.0}
EFFORT = Effort(candidates=4, algorithms=8, finalists=3, seconds=0.5, replays=8)


def task(rows: int, what: LinearShape | DecodeShape, *, whole: bool = True, estimate: float = 4.0) -> Task:
    return Task(rows, what, whole, True, EFFORT, estimate)


@dataclass
class FakeGpu:
    """A Runner. ``clock``: seconds that went by. ``lost_at``: asked to run this, the GPU is gone."""

    table: ChoiceTable = field(default_factory=ChoiceTable)
    clock: float = 0.0
    asked: list[AnyChoice] = field(default_factory=list)
    lost_at: AnyChoice | str = "nothing"
    after_each: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self.clock

    def current(self, task: Task) -> AnyChoice:
        if isinstance(task.what, LinearShape):
            return next((choice for _, choice in self.table.near(task.what)), Blas())
        return nearest_variant(self.table.attention, task.what)

    def candidates(self, task: Task, beside: Sequence[AnyChoice]) -> list[AnyChoice]:
        if isinstance(task.what, DecodeShape):
            return [None, VARIANT]
        return [BRIEFLY_FAST, FAST, SLOW, BROKEN] if task.whole else list(beside)

    def bench(self, task: Task) -> Bench:
        return self

    def keep(self, task: Task, choice: AnyChoice) -> None:
        put(self.table, task, choice)

    def brief_us(self, choice: AnyChoice, replays: int) -> float:
        self.clock += 0.1
        self.asked.append(choice)
        if choice == self.lost_at:
            raise DeviceLost("an illegal memory access was encountered")
        if choice == BROKEN:
            raise RuntimeError("out of resource: shared memory,\n required 300000")
        return BRIEF[choice]

    def lasting_us(self, choice: AnyChoice, seconds: float) -> float:
        self.clock += seconds
        self.after_each()
        return LASTING[choice]
