"""Candidates compiled by processes that refuse, die, or never end."""

from __future__ import annotations

import sys

import pytest
import torch

from launch.tune.compile import READY, compile_all, default_workers
from models.kernels.matmul.choice_table import Choice, Gemv, LinearShape
from tests.launch.tune import stand_in_worker
from tests.launch.tune.stand_in_worker import DIES, REFUSED, RUNS, SLEEPS

SHAPE = LinearShape(1, 4096, 4096, torch.bfloat16)
WORKER = (sys.executable, "-m", "tests.launch.tune.stand_in_worker")


def work(*kinds: int) -> list[tuple[LinearShape, Choice]]:
    return [(SHAPE, Gemv(kind, 1 << number, 4)) for number, kind in enumerate(kinds)]


@pytest.mark.multiprocess
def test_what_is_refused_and_what_kills_its_process_is_told_apart() -> None:
    assert stand_in_worker.READY == READY
    seen: list[int] = []
    asked = work(RUNS, DIES, REFUSED, RUNS, DIES, RUNS)
    found = compile_all([*asked, *asked[:2]], 2, show=seen.append, worker=WORKER)
    assert (found.ran, found.left) == (3, 0)
    assert {(choice, why) for _, choice, why in found.refused} == {
        (asked[1][1], "the process that compiled it ended with exit code -9"),
        (asked[2][1], "too large"),
        (asked[4][1], "the process that compiled it ended with exit code -9"),
    }
    assert seen == sorted(seen)


@pytest.mark.multiprocess
def test_time_and_a_stop_end_it() -> None:
    done: list[int] = []
    found = compile_all(work(RUNS, SLEEPS, RUNS), 1, show=done.append, stop=lambda: 1 in done, worker=WORKER)
    assert (found.ran, found.refused, found.left) == (1, [], 2)
    assert compile_all(work(SLEEPS), 1, seconds=0.0, worker=WORKER).left == 1


@pytest.mark.multiprocess
def test_workers_that_cannot_start_refuse_nothing() -> None:
    found = compile_all(work(RUNS, RUNS), 2, worker=[*WORKER, "never-ready"])
    assert (found.ran, found.refused, found.left) == (0, [], 2)


def test_one_core_is_left_for_the_measurements() -> None:
    assert [default_workers(cores) for cores in (1, 2, 16, 128)] == [0, 1, 14, 14]
