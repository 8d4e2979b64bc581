"""--warm: what was captured before the first request is not captured again while requests run; what is captured late
has the watchdog's patience.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import CAPTURE_SECONDS, WARM_VARIANTS, build_engine, warm_variants
from runtime.config import EngineConfig
from runtime.execute.device.cpu_twin import TwinDevice, TwinGraph
from runtime.execute.executor import Executor
from runtime.execute.result_ring import ResultRing
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from runtime.watchdog.options import WatchdogOptions
from runtime.watchdog.watchdog import Watchdog
from tests.runtime.engine.rig import request, rig, run, tiny_folder
from tests.runtime.engine.serial_answers import Answers
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_depths import outcome
from tests.runtime.engine.test_prefill_graphs import EXACT
from tests.runtime.execute.sampling.sampling_fields import SamplingFields

SAMPLING: dict[str, SamplingFields] = {
    "greedy": {},
    "random": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "top_k": 5, "presence_penalty": 0.5},
    "constrained": {"temperature": 0.8, "top_k": 5, "allowed_token_ids": (3, 4, 9)},
    "constrained, biased": {"temperature": 0.8, "logit_bias": ((3, 1.0),)},
}


def late_captures(folder: Path, warm: tuple[str, ...], kind: str) -> float:
    config = EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", max_num_seqs=2, num_blocks=40, max_model_len=64, warm=warm
    )
    with build_engine(
        config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
    ) as engine:
        sampling: SamplingFields = {"max_tokens": 4, **SAMPLING[kind]}
        run(engine, [request(0, (3, 4, 5), **sampling)])
        return engine.counters["graph_captures_after_warmup"]


@pytest.mark.parametrize("kind", SAMPLING)
def test_a_warm_kind_is_captured_before_the_first_request(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    assert {name.split(",")[0] for name in SAMPLING} == set(WARM_VARIANTS)
    assert late_captures(folder, ("greedy", kind.split(",")[0]) if kind != "greedy" else ("greedy",), kind) == 0
    assert (late_captures(folder, ("greedy",), kind) > 0) == (kind != "greedy")


BETWEEN: dict[str, SamplingFields] = {  # more than a warm kind has, less than the next one
    "greedy, penalised": {"max_tokens": 9, "repetition_penalty": 1.3},
    "random, penalised": {"max_tokens": 9, "temperature": 0.8, "presence_penalty": 0.5},
    "filtered, no penalty": {"max_tokens": 9, "temperature": 0.8, "top_p": 0.7},
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_need_less_than_a_warm_kind_run_in_it_and_draw_the_same_tokens(ranks: int) -> None:
    """Two ranks share a row's vocabulary, and filter it in two forms."""
    requests = [request(i, range(3 + i, 9 + i), **BETWEEN[kind]) for i, kind in enumerate(BETWEEN)]
    lives: list[Answers] = []
    late: list[float] = []
    for kinds in (("greedy",), ("greedy", "random", "penalised")):
        with tensor_rig(ranks, depth=1, rows=1, variants=warm_variants(kinds, ranks), **EXACT) as engine:
            lives.append(outcome(run(engine, requests)))  # one after the other: each in a variant of its own
            late.append(engine.counters["graph_captures_after_warmup"])
    assert lives[0] == lives[1]
    assert late == [len(BETWEEN), 0]


# ---- graphs that requests wait for ----

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


def test_a_late_capture_is_a_phase_of_the_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may compile for minutes, where a step that stands still for seconds ends the job."""
    control, capture = SingleRankControl(), TwinDevice.capture
    left: list[int] = []  # a test that fails inside its engine would end the process
    watchdog = Watchdog(control, WatchdogOptions(tmp_path / "bundles", limit=7.0), leave=left.append)  # has no thread
    found: list[tuple[str, float]] = []
    after: list[tuple[str, float]] = []

    def noted(device: TwinDevice, *arguments: Any, **named: Any) -> TwinGraph:
        found.append((watchdog.place, watchdog.limit))
        return capture(device, *arguments, **named)

    config = EngineConfig(
        model=str(tiny_folder(tmp_path)),
        load_format="dummy",
        device="cpu",
        max_num_seqs=2,
        num_blocks=40,
        max_model_len=64,
        warm=("greedy",),
        speculative_config=NGRAM,
    )
    with build_engine(
        config, control=control, collectives=SingleRank(), agree_min=int, device="cpu", watchdog=watchdog
    ) as engine:
        monkeypatch.setattr(TwinDevice, "capture", noted)
        engine.add(request(0, (3, 4, 5), max_tokens=20, temperature=0.8, stops=()))
        while not found:
            engine.step()
            after.append((watchdog.place, watchdog.limit))
        run(engine, [])
        late = engine.counters["graph_captures_after_warmup"]
    assert left == []
    assert found == [("capture", CAPTURE_SECONDS)] * int(late)
    assert after[-1] == ("plan", 7.0), "as it was before"


def test_every_late_capture_is_surrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain steps, of windows, and of what draws behind a captured step with chunks."""
    inside: list[str] = []
    found: list[tuple[str, list[str]]] = []
    capture = TwinDevice.capture

    @contextmanager
    def around() -> Iterator[None]:
        inside.append("open")
        yield
        inside.clear()

    def noted(device: TwinDevice, *arguments: Any, name: str, **named: Any) -> TwinGraph:
        found.append((name.split(" of ")[0], [*inside]))
        return capture(device, *arguments, name=name, **named)

    proposer, rule = proposer_for(speculative_config(NGRAM)), Speculation(3, most_rows=1, mixed_percent=100)
    with rig(rows=2, prefill_buckets=(16, 32, 72), proposer=proposer, speculation=rule) as engine:
        engine.executor.surround_captures(around)
        monkeypatch.setattr(TwinDevice, "capture", noted)
        run(engine, [request(i, range(3, 12 + i), max_tokens=9 + 9 * i, temperature=0.8, stops=()) for i in range(2)])
    assert {name for name, _ in found} == {"decode", "window", "tail"}
    assert [opened for _, opened in found] == [["open"]] * len(found)
    assert inside == []


def test_rehearsals_without_kernels_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compile_ahead runs them on a GPU: nothing is appended to the results, and all of it is taken back."""
    ran: Counter[str] = Counter()

    def skipped(ring: ResultRing, tokens_BW: Tensor, counts_B: Tensor, finish_B: Tensor, logprobs: Any = None) -> None:
        rows, width = tokens_BW.shape
        ring.check(rows, width, logprobs)

    def ahead(executor: Executor, *rehearsals: Callable[[], None]) -> None:
        device, ring = executor.device, executor._ring
        with monkeypatch.context() as without, executor._model.few_layers():
            without.setattr(ResultRing, "append", skipped)
            for rehearse in rehearsals:
                device.compute.submit(rehearse)
                ran[getattr(rehearse, "func", rehearse).__name__] += 1
            device.compute.synchronize()
        undone = int(ring.appended_1)
        device.compute.submit(ring.start_over)
        device.compute.synchronize()
        ran["undone"] += undone != int(ring.appended_1)

    def tokens() -> dict[int, Any]:
        proposer, rule = proposer_for(speculative_config(NGRAM)), Speculation(3, most_rows=2, mixed_percent=100)
        with rig(rows=2, prefill_buckets=(16, 32, 72), proposer=proposer, speculation=rule) as engine:
            requests = [request(i, range(3, 12 + i), max_tokens=9 + 9 * i, temperature=0.8, stops=()) for i in range(3)]
            return run(engine, requests)

    expected = tokens()
    monkeypatch.setattr(Executor, "_compile_ahead", ahead)
    assert tokens() == expected
    assert ran["_rehearse_pass"] >= 6  # of three numbers of tokens, plain and beside windows
    assert ran["run_over_padding"] == 3  # tails of both, and proposals
    assert ran["undone"] >= 2
