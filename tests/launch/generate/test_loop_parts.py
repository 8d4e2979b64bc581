"""Reading ahead, signals, figures: the small parts around the loop."""

from __future__ import annotations

import io
import signal
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from launch.generate.read_ahead import ReadAhead
from launch.generate.summary import Progress, Summary, percentile
from launch.ranks.signals import Interrupts
from runtime.frontend.outputs import Completion, RequestOutput, Timing
from runtime.schedule.request import FinishReason


def drain(ahead: ReadAhead[int]) -> list[int]:
    found = []
    while not ahead.exhausted:
        item = ahead.take(timeout=300)
        if item is not None:
            found.append(item)
    return found


def test_items_come_in_order_and_then_the_end() -> None:
    assert drain(ReadAhead(range(100), 3)) == list(range(100))


def test_no_more_than_the_bound_is_made_before_it_is_taken() -> None:
    made: list[int] = []
    reached = threading.Event()

    def source() -> Iterator[int]:
        for i in range(50):
            made.append(i)
            if i == 4:
                reached.set()
            yield i

    ahead = ReadAhead(source(), 4)
    assert reached.wait(300)
    assert len(made) == 5, "four wait, one is in the source's hand"
    assert drain(ahead) == list(range(50))


def test_a_failure_of_the_source_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    ahead = ReadAhead(source(), 4)
    assert ahead.take(timeout=300) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.take(timeout=300)
    assert ahead.exhausted
    assert ahead.take() is None


def test_closing_ends_the_thread_whatever_is_left() -> None:
    threads = threading.active_count()
    ahead = ReadAhead(iter(range(10**9)), 2)
    ahead.close()
    assert threading.active_count() == threads
    assert ahead.take() is None


def test_nothing_is_waited_for_unless_asked() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        gate.wait(300)
        yield 7

    ahead = ReadAhead(source(), 1)
    assert ahead.take() is None
    assert not ahead.exhausted
    gate.set()
    assert drain(ahead) == [7]


def test_a_first_signal_asks_and_a_later_one_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Interrupts() as interrupts:
        assert interrupts.exit_code == 0
        signal.raise_signal(signal.SIGINT)
        assert (interrupts.exit_code, interrupts.hurry) == (130, False)
        now[0] += 0.3
        signal.raise_signal(signal.SIGTERM)
        assert (interrupts.exit_code, interrupts.hurry) == (130, False), "torchrun passes a terminal's Ctrl-C on again"
        now[0] += 1.0
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.hurry


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpy_s(count: int) -> None:
    values = array("d", np.random.default_rng(count).random(count))
    for percent in (50, 90, 99):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_a_percentile_of_nothing_is_none() -> None:
    assert percentile(array("d"), 50) is None


def output(tokens: int, ttft: float | None, tpot: float | None) -> RequestOutput:
    completion = Completion(0, "", tuple(range(tokens)), FinishReason.LENGTH, 0)
    return RequestOutput("k", None, (1, 2), (completion,), Timing(0.0, ttft, tpot, 1.0))


def test_a_summary_of_a_run_with_nothing_in_it_prints() -> None:
    summary = Summary()
    text = summary.text({})
    assert "0 finished" in text
    assert "n/a" in text


def test_figures() -> None:
    summary = Summary()
    for i in range(4):
        summary.add(output(i + 1, 0.001 * i, None if i == 0 else 0.002))
    counters = {"steps": 10, "chained_steps": 9, "chain_breaks{start}": 1, "ghost_rows": 3, "wasted_tokens": 4}
    figures = summary.figures(counters)
    assert (figures["finished"], figures["generated_tokens"], figures["prompt_tokens"]) == (4, 10, 8)
    assert figures["ttft_ms"]["p50"] == pytest.approx(1.5)
    assert figures["tpot_ms"] == {"p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert figures["chained_step_ratio"] == 0.9
    assert figures["chain_breaks"] == {"start": 1}
    assert "chained 90.0%; chain breaks: start 1" in summary.text(counters)
    assert "ghost rows    3, wasted tokens 4" in summary.text(counters)


def test_the_progress_bar_is_silent_where_there_is_no_terminal(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = {}
    for file in (io.StringIO(), Terminal()):
        summary = Summary()
        progress = Progress(10, 2, file)
        summary.add(output(3, 0.1, 0.1))
        progress.show(summary)
        shown[type(file)] = file.getvalue()
        progress.close()
    assert shown[io.StringIO] == ""
    assert "3/10" in shown[Terminal]
    assert "tokens/s" in shown[Terminal]


def test_groups_are_told_where_there_are_several() -> None:
    counters = {"steps": 5, "group_requests{0}": 3, "group_requests{1}": 2}
    counters |= {"group_idle_steps{0}": 0, "group_idle_steps{1}": 4}
    summary = Summary()
    assert "\ngroups        requests 3, 2; steps for the others' sake 0, 4;" in summary.text(counters)
    figures = summary.figures(counters)
    assert (figures["group_requests"], figures["group_idle_steps"]) == ([3, 2], [0, 4])
    assert "groups" not in summary.text({"steps": 5})
