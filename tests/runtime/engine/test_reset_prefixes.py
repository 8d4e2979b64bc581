"""A reset of the prefix cache is an agreed event: of all ranks and groups, of recurrent state and a drafter's KV."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.schedule.config import SnapshotPolicy
from runtime.schedule.plan import Parked
from runtime.schedule.speculation import Speculation
from tests.runtime.engine.conftest import over_model
from tests.runtime.engine.group_rigs import dealt_rig
from tests.runtime.engine.lives import prompt
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_groups import LIMITS
from tests.runtime.speculate.recorded import SHAPE, VOCABULARY, Drafter

Make = Callable[..., AbstractContextManager[Engine]]
KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "one rank": (rig, {}),
    "two ranks": (partial(tensor_rig, 2), {}),
    "two ranks, told late": (partial(tensor_rig, 2, horizon=3), {}),
    "two groups": (dealt_rig, {"shape": LIMITS["shape"]}),
    "recurrent state": (rig, {"snapshots": SnapshotPolicy(8, worth=1)}),
    "a drafter": (rig, {"speculation": Speculation(4), "shape": SHAPE}),
}


OFTEN = ("two ranks, told late", "two groups", "recurrent state", "a drafter")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.long) for kind in KINDS]
)
def test_what_comes_behind_it_is_computed_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, and as many computed as at first, while another request with the same prompt runs on."""
    make, limits = KINDS[kind]
    if kind == "recurrent state":
        over_model("qwen3.5", monkeypatch)
    if kind == "a drafter":
        limits = limits | {"proposer": Drafter("mtp", tmp_path)}
    same = tuple(token % VOCABULARY for token in prompt(70, 1))

    def asked(number: int) -> dict[str, int | float]:
        """How much the counters grew."""
        before = dict(engine.counters)
        found = run(engine, [request(number, same, max_tokens=4, stops=())])
        answers.append(tuple(found[number].token_ids))
        return {name: engine.counters[name] - before[name] for name in ("prefill_tokens", "prefix_hit_tokens")}

    answers: list[tuple[int, ...]] = []
    with make(depth=2, rows=4, blocks=120, max_model_len=160, **limits) as engine:
        first = asked(0)
        assert first == {"prefill_tokens": 70, "prefix_hit_tokens": 0}
        assert asked(1)["prefix_hit_tokens"] >= 64, "or there is nothing to forget"
        engine.add(request(2, same, max_tokens=60, stops=()))
        for _ in range(12):
            engine.step()
        engine.reset_prefix_cache()
        assert asked(3) == first
        assert asked(4)["prefix_hit_tokens"] >= 64, "what came behind it is found"
    assert len(set(answers)) == 1


def test_a_parked_session_keeps_what_it_knows() -> None:
    said = prompt(3, 9)
    with rig(depth=2, rows=4, blocks=80, max_model_len=128, max_sessions=2) as engine:
        engine.start(request(0, prompt(30, 1), max_tokens=6, stops=()), 6, keep=True)
        tokens = _until_parked(engine)
        computed = engine.counters["prefill_tokens"]
        engine.reset_prefix_cache()
        engine.extend(0, 1, said, 5, 5)
        tokens += _until_parked(engine)
        assert engine.counters["prefill_tokens"] - computed == len(said) + 1
        whole = (*prompt(30, 1), *tokens[:6], *said)
        alone = run(engine, [request(1, whole, max_tokens=5, stops=())])
        assert list(alone[1].token_ids) == tokens[6:]
        engine.cancel(0)
        run(engine, [])


def _until_parked(engine: Engine) -> list[int]:
    found: list[int] = []
    for _ in range(200):
        output = engine.step()
        found += [token for row, token in zip(output.request_ids, output.tokens, strict=True) if row == 0]
        if any(isinstance(notice, Parked) for notice in output.notices):
            return found
    raise AssertionError("it was never parked")
