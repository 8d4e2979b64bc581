"""A budget in CPU seconds for each test: a pytest plugin (tests/conftest.py).

A test may take LIMIT_S, in a quick folder or file (QUICK without SLOWER) QUICK_LIMIT_S. Markers in LIFTED remove the
limit. A test above TIMES times its limit runs a second time, and fails if that run is above it, too: the first run may
have filled caches, and on a busy machine the same work takes more CPU time. A worker's first test pays for imports and
is excluded. Seconds are those of a CPU that takes REFERENCE_S for a fixed piece of work: a slower one divides.

Knows: CPU time of this process and of child processes that were waited for. Does not know: wall time, which depends on
the machine's load, or processes that outlive a test.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

LIMIT_S = 1.0
QUICK_LIMIT_S = 0.1
TIMES = 8  # a busy machine with a slow CPU took six times the limit for tests that a fast one does within it
REFERENCE_S = 0.010
LIFTED = ("slow", "long", "gpu", "multigpu", "slurm")
# Quick folders and files: each test takes at most QUICK_LIMIT_S, and `make check` runs them after every edit.
QUICK: tuple[str, ...] = (
    "tests/bench",
    "tests/launch",
    "tests/models",
    "tests/parallel",
    "tests/runtime",
    "tests/slurm",
    "tests/docs/test_links.py",
)
# Exceptions: folders and files in QUICK with tests that take longer.
SLOWER: tuple[str, ...] = (
    "tests/bench/test_front_door.py",
    "tests/bench/test_merge_choices.py",
    "tests/launch/api/test_requests.py",
    "tests/launch/api/test_sampling_defaults.py",
    "tests/launch/bench/load/test_openai_backend.py",
    "tests/launch/bench/test_commands.py",
    "tests/launch/bench/test_profile.py",
    "tests/launch/generate/test_bad_input.py",
    "tests/launch/generate/test_data_parallel.py",
    "tests/launch/generate/test_generate.py",
    "tests/launch/generate/test_kill_anywhere.py",
    "tests/launch/ranks/test_nccl_postmortem.py",
    "tests/launch/ranks/test_processes.py",
    "tests/launch/sweep/report",
    "tests/launch/serve/test_served.py",
    "tests/launch/serve/test_soak.py",
    "tests/launch/sweep",
    "tests/launch/test_complete.py",
    "tests/launch/test_entry.py",
    "tests/launch/tune/test_gpu_runner.py",
    "tests/launch/tune/test_plan.py",
    "tests/launch/tune/test_shapes.py",
    "tests/models/drafters/test_drafters.py",
    "tests/models/drafters/test_mtp_layouts.py",
    "tests/models/kernels/recurrent/test_trees.py",
    "tests/models/kernels/test_compile_ahead.py",
    "tests/models/kernels/test_compiled_kernels.py",
    "tests/models/kernels/test_flashinfer_build.py",
    "tests/models/kernels/test_interpreted_kernels.py",
    "tests/models/kernels/test_matmul_dispatch.py",
    "tests/models/kernels/test_shipped_choices.py",
    "tests/models/test_config.py",
    "tests/models/test_demo_files.py",
    "tests/models/test_fp8.py",
    "tests/models/test_parity.py",
    "tests/models/test_weights_fuzz.py",
    "tests/parallel/control/test_agreement.py",
    "tests/runtime/daemon/test_frames.py",
    "tests/runtime/daemon/test_protocol.py",
    "tests/runtime/daemon/test_twin.py",
    "tests/runtime/engine",
    "tests/runtime/execute/sampling/test_noise.py",
    "tests/runtime/execute/step/test_rehearsal.py",
    "tests/runtime/execute/test_late_trials.py",
    "tests/runtime/frontend/test_async_engine.py",
    "tests/runtime/frontend/test_client.py",
    "tests/runtime/frontend/test_tokenizer.py",
    "tests/runtime/groups/test_idle_groups.py",
    "tests/runtime/observe/test_group_records.py",
    "tests/runtime/observe/test_observer.py",
    "tests/runtime/schedule/test_blocks.py",
    "tests/runtime/schedule/test_fuzz.py",
    "tests/runtime/schedule/test_ledger.py",
    "tests/runtime/schedule/test_sessions.py",
    "tests/runtime/schedule/test_shares.py",
    "tests/runtime/schedule/test_sharing.py",
    "tests/runtime/schedule/test_simulate.py",
    "tests/runtime/speculate",
    "tests/runtime/test_chain_depth.py",
    "tests/runtime/test_step_budget.py",
    "tests/runtime/test_window_costs.py",
    "tests/runtime/watchdog/test_watchdog.py",
)
ROOT = Path(__file__).resolve().parents[1]
TIMES_FILE = (
    "LOCKSTRIDE_TEST_TIMES"  # environment: a file for one JSON line per test: name, CPU s (of the reference), wall s
)


def cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def slowness() -> float:
    """How many times longer this CPU takes for a fixed piece of work than REFERENCE_S; at least 1."""

    def once() -> float:
        began, total = time.process_time(), 0
        for number in range(300_000):
            total += number
        return time.process_time() - began

    return max(1.0, min(once() for _ in range(3)) / REFERENCE_S)


@cache  # asked for each test of a file
def is_quick(path: Path) -> bool:
    if not path.is_relative_to(ROOT):
        return False
    name = path.relative_to(ROOT).as_posix()

    def within(listed: tuple[str, ...]) -> bool:
        return any(name == one or name.startswith(f"{one}/") for one in listed)

    return within(QUICK) and not within(SLOWER)


def limit_s(item: pytest.Item) -> float:
    """The limit of ``item`` in CPU seconds; infinite with one of the markers LIFTED."""
    if any(item.get_closest_marker(name) for name in LIFTED):
        return float("inf")
    return QUICK_LIMIT_S if item.get_closest_marker("quick") else LIMIT_S


class Budget:
    """The plugin. ``clock`` returns CPU seconds; tests of this file give another one, without ``slowness``."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or cpu_s
        self._measure: Callable[[], float] = (lambda: 1.0) if clock else slowness
        self._slowness = self._measure()
        self._first = True

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """`-m quick` does not import test files that are not quick."""
        if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
            return None if is_quick(collection_path) else True
        return None

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if is_quick(item.path) and not any(item.get_closest_marker(name) for name in (*LIFTED, "multiprocess")):
            item.add_marker("quick")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports, used = self._run(item, nextitem)
        first, self._first = self._first, False
        if not first and used > TIMES * limit_s(item) and all(report.passed for report in reports):
            self._slowness = max(self._slowness, self._measure())  # others may have come since the start
            again, used = self._run(item, nextitem)
            if used > TIMES * limit_s(item) and all(report.passed for report in again):  # some tests run only once
                reports = [exceeded(report, used, limit_s(item)) for report in again]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> tuple[list[pytest.TestReport], float]:
        if isinstance(item, pytest.Function):
            item._initrequest()  # a second run needs new fixtures
        began, at = self._clock(), time.monotonic()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        used = (self._clock() - began) / self._slowness
        if path := os.environ.get(TIMES_FILE):
            with open(path, "a") as file:
                file.write(json.dumps([item.nodeid, round(used, 3), round(time.monotonic() - at, 3)]) + "\n")
        return reports, used


def exceeded(report: pytest.TestReport, used: float, limit: float) -> pytest.TestReport:
    """``report``; if it is that of the test's call, and the call passed, it is marked as failed."""
    if report.when == "call" and report.passed:
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} took {used:.2f} CPU seconds when it ran again, {TIMES} times the limit of {limit:g} s. "
            "Make it cheaper, or mark it slow (make check leaves it out) or long (make test leaves it out)."
        )
    return report
