"""The log of collectives: runs of like calls by number, as many as it keeps, and failures under its numbers."""

from __future__ import annotations

import pytest
import torch

from parallel.comm.call_log import CallLog, CallRun, CollectiveError


def test_like_calls_are_one_run() -> None:
    log = CallLog()
    assert log.snapshot() == (0, 0, ())
    for name, shape, dtype, count in (
        ("all_reduce", (8, 48), torch.float32, 5),
        ("all_gather", (8, 53), torch.float32, 1),
        ("all_reduce", (8, 48), torch.float32, 5),
        ("all_reduce", (16, 48), torch.float32, 1),
        ("all_reduce", (16, 48), torch.bfloat16, 1),
    ):
        for _ in range(count):
            log.note(name, torch.Size(shape), dtype)
    assert log.snapshot() == (
        0,
        13,
        (
            CallRun(0, "all_reduce [8, 48] float32"),
            CallRun(5, "all_gather [8, 53] float32"),
            CallRun(6, "all_reduce [8, 48] float32"),
            CallRun(11, "all_reduce [16, 48] float32"),
            CallRun(12, "all_reduce [16, 48] bfloat16"),
        ),
    )


def test_old_runs_are_forgotten_and_numbers_stay() -> None:
    log = CallLog()
    for number in range(100):
        log.note("all_reduce", torch.Size((number,)), torch.float32)
    _, made, runs = log.snapshot()
    assert made == 100
    assert [run.first for run in runs] == list(range(100 - CallLog.RUNS, 100))


@pytest.mark.parametrize("calls", [1, 3])
def test_a_call_that_is_being_noted_is_not_told_yet(calls: int) -> None:
    log = CallLog(group=4)
    for _ in range(calls):
        log.note("all_reduce", torch.Size((4,)), torch.float32)
    log._runs.append((log.made, "all_gather", torch.Size((4,)), torch.float32))  # the other thread is this far
    assert log.snapshot() == (4, calls, (CallRun(0, "all_reduce [4] float32"),))


def test_a_collective_that_fails_is_told_with_its_number() -> None:
    log = CallLog()
    x = torch.zeros(8, 48)
    with log.call("all_reduce", x):
        pass
    with (
        pytest.raises(CollectiveError, match=r"collective 1 \(all_gather \[8, 48\]\) failed: reset by peer"),
        log.call("all_gather", x),
    ):
        raise RuntimeError("reset by peer")
    assert log.made == 2
