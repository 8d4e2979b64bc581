"""How a choice is made, and that no interruption loses one that was made. No GPU: see fake_gpu.py."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.errors import UsageError
from launch.tune.journal import AnyChoice, Journal, opened
from launch.tune.plan import Task
from launch.tune.tuner import DeviceLost, Pace, Tuner
from models.kernels.attention.decode_variant import DecodeShape
from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import Blas, ChoiceTable, LinearShape
from tests.launch.tune.fake_gpu import BRIEFLY_FAST, BROKEN, FAST, SLOW, VARIANT, FakeGpu, task

IDENTITY = {"gpu": "NVIDIA H200", "torch": "2.11"}
SHAPES = [LinearShape(rows, 6144, 4096, torch.bfloat16) for rows in (8, 32, 64)]
TASKS = [*(task(shape.rows, shape) for shape in SHAPES), task(64, DecodeShape(512, 4, 128, torch.bfloat16))]
BETWEEN = task(40, dataclasses.replace(SHAPES[0], rows=40), whole=False)


class Bench:
    """One folder, in which runs follow each other as processes would."""

    def __init__(self, folder: Path) -> None:
        self.journal, self.table = folder / "gpu.tune.jsonl", folder / "gpu.tuned.json"

    def run(self, gpu: FakeGpu, tasks: list[Task] = TASKS, *, fresh: bool = False, **more: Any) -> list[Task]:
        with opened(self.journal, IDENTITY, fresh=fresh) as journal:
            return self.tuner(gpu, journal, **more).run(tasks)

    def tuner(self, gpu: FakeGpu, journal: Journal, **more: Any) -> Tuner:
        table = choice_table.recall(self.table)
        return Tuner(gpu, journal, table, self.table, now=gpu.now, began=0.0, **more)

    @property
    def held(self) -> ChoiceTable:
        return choice_table.load(self.table)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_lasts_is_chosen(bench: Bench) -> None:
    assert bench.run(FakeGpu()) == []
    assert bench.held.choices == {shape.key: FAST for shape in SHAPES}
    assert bench.held.attention == {TASKS[-1].what.key: VARIANT}
    with opened(bench.journal, IDENTITY) as journal:
        measured = journal.done[TASKS[0].key]
    assert (measured.before, measured.us_before, measured.us_after) == (Blas(), 12.0, 10.0)
    assert [one.choice for one in measured.timed] == [FAST, BRIEFLY_FAST, Blas(), SLOW]
    assert [one.lasting_us for one in measured.timed] == [10.0, 11.0, 12.0, None]


def test_noise_changes_no_choice(bench: Bench) -> None:
    gpu = FakeGpu(ChoiceTable({SHAPES[0].key: FAST}))

    def lasting_us(choice: AnyChoice, seconds: float) -> float:
        return {FAST: 10.0, BRIEFLY_FAST: 9.97}[choice]  # type: ignore[index]

    gpu.lasting_us = lasting_us  # type: ignore[method-assign]
    bench.run(gpu, TASKS[:1])
    assert bench.held.choices == {SHAPES[0].key: FAST}


def test_a_candidate_that_fails_is_left_out_with_its_reason(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        bench.run(FakeGpu(), TASKS[:1])
    assert (
        f"{TASKS[0].key}: {BROKEN} is left out: RuntimeError: out of resource: shared memory, required" in caplog.text
    )
    with opened(bench.journal, IDENTITY) as journal:
        (failed,) = journal.done[TASKS[0].key].failed
    assert (failed.choice, "required 300000" in failed.reason) == (BROKEN, True)


def test_buckets_between_try_what_was_fast_beside_them(bench: Bench) -> None:
    gpu = FakeGpu()
    bench.run(gpu, [*TASKS[1:3], BETWEEN])
    assert gpu.asked[-4:] == [FAST, BRIEFLY_FAST, Blas(), SLOW]
    assert bench.held.choices[BETWEEN.what.key] == FAST


@pytest.mark.parametrize("after", range(1, 12))
def test_a_run_that_is_killed_anywhere_goes_on_where_it_was(bench: Bench, after: int) -> None:
    """At every measurement that lasts: what was chosen before stays, and is not measured again."""

    class KilledError(BaseException):
        pass

    gpu, lasted = FakeGpu(), 0

    def die() -> None:
        nonlocal lasted
        lasted += 1
        if lasted == after:
            raise KilledError

    gpu.after_each = die
    with pytest.raises(KilledError):
        bench.run(gpu)
    held = choice_table.recall(bench.table)
    again = FakeGpu()
    assert bench.run(again) == []
    assert bench.held.choices == {shape.key: FAST for shape in SHAPES}
    assert bench.held.attention == {TASKS[-1].what.key: VARIANT}
    assert held.choices.items() <= bench.held.choices.items()
    done = len(held.choices) + len(held.attention)
    whole = FakeGpu()
    bench.run(whole, fresh=True)
    assert len(again.asked) < len(whole.asked) or done == 0
    assert again.table.choices == whole.table.choices, "what was chosen before is in place for what follows"


def test_a_lost_table_is_made_again_from_the_journal(bench: Bench) -> None:
    bench.run(FakeGpu())
    held = bench.held
    bench.table.unlink()
    gpu = FakeGpu()
    bench.run(gpu)
    assert gpu.asked == []
    assert bench.held == held


def test_other_choices_of_the_table_stay(bench: Bench) -> None:
    other = ChoiceTable({"bfloat16 8x8 x8": SLOW}, {"bfloat16 1x64 x8": VARIANT})
    choice_table.save(bench.table, other)
    bench.run(FakeGpu())
    assert other.choices.items() <= bench.held.choices.items()
    assert other.attention.items() <= bench.held.attention.items()


def test_fresh_measures_again(bench: Bench) -> None:
    bench.run(FakeGpu())
    gpu = FakeGpu()
    bench.run(gpu, fresh=True)
    assert gpu.asked


def test_the_budget_ends_a_run_before_it_is_overrun(bench: Bench) -> None:
    gpu = FakeGpu()
    left = bench.run(gpu, budget=9.0)
    assert left == TASKS[2:]
    assert gpu.clock <= 9.0
    assert bench.run(FakeGpu(), budget=9.0) == []


def test_a_stop_is_heard_between_tasks(bench: Bench) -> None:
    gpu = FakeGpu()
    assert bench.run(gpu, stop=lambda: gpu.clock > 0) == TASKS[1:]
    assert bench.held.choices == {SHAPES[0].key: FAST}


def test_a_candidate_that_takes_the_gpu_along_is_not_tried_again(bench: Bench) -> None:
    with pytest.raises(DeviceLost):
        bench.run(FakeGpu(lost_at=SLOW))
    gpu = FakeGpu(lost_at=SLOW)
    assert bench.run(gpu, TASKS[:1]) == []
    assert SLOW not in gpu.asked
    assert bench.held.choices == {SHAPES[0].key: FAST}
    with opened(bench.journal, IDENTITY) as journal:
        assert SLOW in [one.choice for one in journal.done[TASKS[0].key].failed]


def test_a_task_without_memory_keeps_its_default(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu()

    def full(task: Task) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu.bench = full  # type: ignore[method-assign]
    assert bench.run(gpu, TASKS[:1]) == []
    assert "is not measured: OutOfMemoryError: CUDA out of memory" in caplog.text
    assert bench.held.choices == {}


def test_a_disk_that_fails_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, table: ChoiceTable) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(choice_table, "save", full)
    with pytest.raises(UsageError, match=r"No space left on device.*--out"):
        bench.run(FakeGpu())


def test_estimates_follow_the_pace() -> None:
    pace = Pace()
    assert pace.of(10.0) == 10.0
    pace.note(20.0, 60.0)
    assert pace.of(10.0) == 20.0
    told: list[float] = []
    tell: Callable[[float], None] = told.append
    tell(pace.of(0.0))
    assert told == [0.0]
