"""A model whose layers alternate between all tokens and a sliding window, each kind with a page table of its own.

Every life is compared, bit for bit, with one that gives no page back before its request ends; and pages of a window
that are free hold NaN, so that a query that reads one would show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from runtime.engine import Engine
from runtime.execute.cache.sizing import WindowDemand
from runtime.schedule import windows
from runtime.schedule.config import StepLimits
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.tree import branching
from tests.runtime.engine.conftest import long
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import Life, live, oracle, people, prompt, same
from tests.runtime.engine.replay_proposer import script_of
from tests.runtime.engine.rig import MIXED, request
from tests.runtime.engine.serial_answers import serial_answers
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_groups import Lives, ids_from
from tests.runtime.engine.test_sessions import Talk, converse, same_as_requests
from tests.runtime.engine.test_trees import RANKS, KnownAnswers
from tests.runtime.speculate.recorded import SHAPE as SMALL
from tests.runtime.speculate.recorded import VOCABULARY, Drafter
from tests.runtime.speculate.test_eagle3 import Head

pytestmark = pytest.mark.slow

WINDOW = 20


class Shape(dict[str, Any]):
    """A key of answers that are computed once."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(str(self))


SHAPE = Shape(
    architectures=["MinistralForCausalLM"],
    model_type="ministral",
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=WINDOW,
)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Of windows, as few as so many requests need; by default eight."""

    def least(requests: int) -> None:
        def of(window: int, limits: StepLimits) -> WindowDemand:
            each = limits.window_blocks(window)
            return WindowDemand(window, each, requests * each)

        monkeypatch.setattr(WindowDemand, "of", of)

    least(8)
    return least


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Pages that windows have given back."""
    usual, counts = windows.give_back, [0]

    def counting(ledger: Any, sequence: Any) -> None:
        before = sum(pages.first for pages in sequence.windows)
        usual(ledger, sequence)
        counts[0] += sum(pages.first for pages in sequence.windows) - before

    monkeypatch.setattr(windows, "give_back", counting)
    yield counts
    assert counts[0] > 5


def retained(requests: list[Request], **limits: Any) -> Life:
    """Where no window moves on."""
    return _retained(tuple(requests), tuple(limits.items()))


@cache
def _retained(requests: tuple[Request, ...], limits: tuple[tuple[str, Any], ...]) -> Life:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "give_back", lambda ledger, sequence: None)
        patch.setattr(WindowDemand, "of", lambda window, limits: WindowDemand(window, 200, 200))
        return live(list(requests), depth=0, shape=SHAPE, **dict(limits))


def poison(engine: Engine, turn: int) -> None:
    """NaN in the pages of windows that are free and cannot be found, on the compute stream; also in the trash block."""
    (pool,) = engine.scheduler.ledger.windows
    idle = [0, *(b for b in range(1, pool.count + 1) if not pool.refs[b] and not pool.findable(b))]
    cache = engine.executor.pool
    layers = [v for n, v in enumerate(cache._views) if isinstance(v, Tensor) and cache.layout.group_of(n)]
    assert len(layers) == 2
    assert all(layer.shape[1] == 1 + pool.count for layer in layers)

    def fill() -> None:
        for layer in layers:
            layer[:, idle] = float("nan")

    engine.executor.device.compute.submit(fill)


def mixture() -> list[Request]:
    """Prompts of 3 to 95 tokens, some with a common beginning, and answers that cross windows."""
    requests = people(6, length=3, max_tokens=40)
    lengths = (3, 12, 33, 64, 80, 95)
    return [replace(r, prompt_token_ids=prompt(n, n % 2)) for r, n in zip(requests, lengths, strict=True)]


@pytest.mark.parametrize(
    ("depth", "tokens", "mixed"), [(0, 64, True), (1, 16, True), (2, 16, False), (2, 64, True)], ids=str
)
def test_answers_are_those_with_all_pages_kept(depth: int, tokens: int, mixed: bool, moved: list[int]) -> None:
    how: dict[str, Any] = {"max_prefill_tokens": tokens, "mixed": MIXED if mixed else None}
    life = live(mixture(), poison, depth=depth, shape=SHAPE, **how)
    same(life, retained(mixture()))
    assert life.counters["window_blocks{20}"] == 8 * StepLimits(8, 16, 8, 128, depth).window_blocks(WINDOW)


@pytest.mark.parametrize("depth", [long(0), 2])
def test_prefix_hits_begin_with_the_pages_of_their_window(depth: int, moved: list[int]) -> None:
    requests = mixture()
    again = [replace(r, request_id=40 + r.request_id) for r in requests[:6]]
    life = live(requests, poison, depth=depth, shape=SHAPE, later={30: again[:3], 60: again[3:]})
    same(life, retained([*requests, *again], prefix_caching=False))
    assert life.counters["prefix_hit_tokens"] > 150


@pytest.mark.parametrize("depth", [long(0), 2])
def test_evicted_requests_are_computed_again(depth: int, moved: list[int], few_blocks: Callable[[int], None]) -> None:
    few_blocks(6)
    life = live(mixture(), poison, depth=depth, shape=SHAPE, blocks=30, max_prefill_tokens=32)
    same(life, retained(mixture()))
    assert life.counters["evictions"] == life.counters["evicted_for{full}"]


@pytest.mark.parametrize("depth", [long(0), 2])
def test_answers_to_one_prompt_copy_its_last_page_in_every_group(depth: int, moved: list[int]) -> None:
    requests = [request(20, prompt(45, 1), stops=(), temperature=1.0, max_tokens=50, n=3, logprobs=2)]
    life = live(requests, poison, depth=depth, shape=SHAPE)
    same(life, retained(requests))
    assert life.counters["forks"] == 2


@pytest.mark.parametrize("depth", [long(0), 2])
def test_trees_move_entries_in_every_group(depth: int, moved: list[int]) -> None:
    """A node's window is bounded by its depth, and rejected nodes move no window on."""
    requests = people(5, max_tokens=50)
    script = script_of(requests, {i: tokens for i, (tokens, _) in oracle(requests, shape=SHAPE).answers.items()})
    proposer = branching(lambda parts: KnownAnswers(parts, script), RANKS)
    how: dict[str, Any] = {"proposer": proposer, "speculation": Speculation(4), "tree": 12, "blocks": 400}
    life = live(requests, poison, depth=depth, shape=SHAPE, **how)
    assert life.counters["spec_num_accepted_tokens"] > 20
    same(life, retained(requests))


@pytest.mark.parametrize("kind", ["dflash", long("mtp"), long("eagle3")])
def test_drafters_read_all_pages_beside_windows(kind: str, moved: list[int], tmp_path: Path) -> None:
    """Their keys are in the group of all tokens, and prefixes are found with a drafter, too."""
    shape = Shape(SHAPE | SMALL)
    drafter: Drafter = Head(tmp_path) if kind == "eagle3" else Drafter(kind, tmp_path, target_layers=4)
    requests = [replace(r, prompt_token_ids=tuple(t % VOCABULARY for t in r.prompt_token_ids)) for r in mixture()]
    again = [replace(r, request_id=40 + r.request_id) for r in requests[3:]]
    how: dict[str, Any] = {"later": {40: again}, "shape": shape, "max_prefill_tokens": 32}
    life = live(requests, poison, depth=2, proposer=drafter, speculation=Speculation(4), **how)
    same(life, live([*requests, *again], depth=0, shape=shape, prefix_caching=False))
    assert life.counters["spec_num_accepted_tokens"] > 10
    assert life.counters["prefix_hit_tokens"] > 150


@pytest.mark.parametrize("depth", [0, 2])
def test_captured_prefill_reads_the_table_of_its_group(depth: int, moved: list[int]) -> None:
    how: dict[str, Any] = {
        "kernels": exact_kernels(tables=True),
        "prefill_buckets": (16, 32, 64),
        "max_prefill_tokens": 64,
    }
    life = live(mixture(), poison, depth=depth, shape=SHAPE, **how)
    same(life, retained(mixture()))


@pytest.mark.parametrize(("depth", "blocks", "least"), [long(0, 200, 8), (2, 200, 8), long(2, 20, 4)])
def test_sessions_go_on_behind_their_windows(
    depth: int, blocks: int, least: int, moved: list[int], few_blocks: Callable[[int], None]
) -> None:
    """Parked between quanta and turns; with few blocks they are evicted and computed again."""
    few_blocks(least)
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "logprobs": 1, "stops": ()}
    them = [Talk(request(i, prompt(20 + 9 * i, i), **fields), [(prompt(17, 20 + i), 20)], 3) for i in range(4)]
    how: dict[str, Any] = {"blocks": blocks, "think": 4}
    life = converse(them, depth=depth, rows=3, max_prefill_tokens=11, shape=SHAPE, **how)
    same_as_requests(them, life, shape=SHAPE)
    assert (life.counters["session_evictions"] > 0) == (blocks == 20)


def test_two_ranks_move_their_windows_alike(moved: list[int]) -> None:
    life = live(mixture(), depth=2, shape=SHAPE, over=lambda **how: tensor_rig(2, **how))
    same(life, retained(mixture()))


SPARSE = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 3}


@pytest.mark.parametrize("depth", [long(0), 2])
def test_groups_move_their_windows_on_by_themselves(depth: int, moved: list[int]) -> None:
    """Every layer has a window; requests arrive in one group while another one decodes."""
    shape = SPARSE | {"model_type": "mixtral", "num_hidden_layers": 2, "sliding_window": WINDOW}
    first, second = mixture()[:3], ids_from(100, mixture()[3:])
    lives = Lives([{0: first}, {9: second}], shape=shape, depth=depth)
    found = {i: (ended.token_ids, ended.reason) for i, ended in lives.finished.items()}
    assert found == serial_answers([*first, *second], shape=shape, exact=True)
    assert lives.rows[0] == lives.rows[1]
