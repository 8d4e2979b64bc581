"""1,000 bad and border requests through each door of an engine of one rank and of two (5,000 with ``-m long``): nobody
else notices. What is refused is refused before another rank hears of it, so two ranks take the time for those that are
served.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.execute.executor import Executor
from runtime.execute.sampling.inputs import NARROWER_FEATURES
from runtime.frontend.validation import RequestError
from tests.runtime.engine.bad_requests import CONTEXT, ROWS, check, model_folder
from tests.runtime.engine.rig import request, rig, run
from tests.torchrun import torchrun

COUNTS = pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.long)])


def enough(found: dict[str, int], count: int) -> None:
    """Most were refused, and a good part was not: the generator is about borders, too."""
    for door in ("complete", "add"):
        assert count // 2 < found[door] < count * 9 // 10, found
    assert found["steps"] > 100


@COUNTS
def test_one_rank(tmp_path: Path, count: int) -> None:
    with rig(rows=ROWS, max_model_len=CONTEXT, max_prefill_tokens=128) as engine:
        enough(check(engine, model_folder(tmp_path), count), count)


@pytest.mark.multiprocess
@COUNTS
def test_two_ranks(tmp_path: Path, count: int) -> None:
    folder, output = model_folder(tmp_path / "model"), tmp_path / "found.json"
    ran = torchrun(2, "tests.runtime.engine.bad_requests", str(folder), str(count), str(output))
    assert ran.returncode == 0, ran.said[-3000:]
    enough(json.loads(output.read_text()), count)


@pytest.mark.parametrize("bad", [-1, 1 << 62, 1.5, "7", None])
def test_what_cannot_be_an_id_is_refused_by_every_verb(bad: Any) -> None:
    """Before a turn takes it up, with the requests of others."""
    other = request(3, range(5), max_tokens=3)
    with rig(rows=ROWS) as engine:
        engine.add(other)
        verbs: tuple[Callable[[], object], ...] = (
            lambda: engine.cancel(bad),
            lambda: engine.pause(bad),
            lambda: engine.resume(bad),
            lambda: engine.proceed(bad, 1, 5),
            lambda: engine.extend(bad, 1, [4], 5, 5),
            lambda: engine.fork(bad, 3),
            lambda: engine.fork(8, bad),
        )
        for verb in verbs:
            with pytest.raises(RequestError, match="request_id is "):
                verb()
        for tokens in (0, -1, 1 << 31):
            with pytest.raises(RequestError, match="tokens is "):
                engine.proceed(3, 1, tokens)
        engine.cancel(5)  # of nobody
        assert list(run(engine, [])) == [3]


def test_what_there_is_no_memory_for_is_refused_and_nobody_else_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two features at once, of which a start-up found that one alone fits: its graphs are never captured."""
    answers = [request(number, range(3 + number, 20 + number), max_tokens=12) for number in range(4)]
    with rig(rows=ROWS, depth=2) as engine:
        clean = run(engine, answers)
    monkeypatch.setattr(Executor, "_widest_variant", lambda executor: NARROWER_FEATURES[0])
    refused = []

    def add_another(engine: Engine, turn: int) -> None:
        if turn not in (2, 5):
            return
        with pytest.raises(RequestError, match=r"penalties.* --memory-fraction") as told:
            engine.add(request(100 + turn, range(9), presence_penalty=1.0, logprobs=20, max_tokens=4))
        refused.append(str(told.value))

    with rig(rows=ROWS, depth=2) as engine:
        assert run(engine, answers, add_another) == clean
        assert len(refused) == 2
        assert engine.counters["admissions"] == len(answers)
        captured = [name for name in engine.counters if name.startswith("late_captures")]
        assert captured == [], "a graph was made for somebody who was refused"
        served = run(engine, [request(7, range(5), logprobs=20, max_tokens=4, stops=())])
        assert len(served[7].token_ids) == 4, "what there is memory for is served"
