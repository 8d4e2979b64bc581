"""NaN where nobody may look: freed blocks, the trash block, a broken request's own cache. No live row changes."""

from __future__ import annotations

import pytest
from torch import Tensor

from runtime.engine import Engine
from runtime.schedule import reservation
from runtime.schedule.plan import Finished
from runtime.schedule.request import FinishReason
from runtime.schedule.states import State
from tests.runtime.engine.conftest import over_models
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.test_depths import mixture, outcome

pytestmark = pytest.mark.usefixtures("every_model")


def fill_with_nan(engine: Engine, blocks: list[int]) -> None:
    """On the compute stream, behind every step launched so far."""
    layers: list[Tensor] = engine.executor.pool.paged

    def poison() -> None:
        for layer in layers:
            layer[:, blocks] = float("nan")

    engine.executor.device.compute.submit(poison)


def idle_blocks(engine: Engine) -> list[int]:
    """Blocks that nobody owns, that no fence holds, and whose contents nobody can find again; and the trash block."""
    pool = engine.scheduler.pool
    unreferenced = [b for b in range(1, pool.count + 1) if pool.refs[b] == 0]
    return [0, *(b for b in unreferenced if b not in pool._cached)]


@pytest.mark.parametrize(
    ("every_model", "depth"), over_models((0, 2, 4), at_once=0, turned=1), indirect=["every_model"]
)
def test_freed_blocks_and_the_trash_block_are_never_read(depth: int) -> None:
    requests = mixture(11)
    with rig(depth=depth) as engine:
        clean = run(engine, requests)
    with rig(depth=depth, blocks=60) as engine:
        poisoned = run(engine, requests, lambda e, turn: fill_with_nan(e, idle_blocks(e)))
    assert outcome(poisoned) == outcome(clean)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_request_with_nan_ends_alone_and_its_blocks_serve_others(depth: int) -> None:
    others = mixture(12, count=10)
    broken = request(77, range(40, 60), max_tokens=60, stops=())
    with rig(depth=depth, prefix_caching=False) as engine:
        clean = run(engine, others)

    def act(engine: Engine, turn: int) -> None:
        running = [s for s in engine.scheduler.ledger.by_state[State.DECODE].values() if s.request.request_id == 77]
        if turn == 6:
            fill_with_nan(engine, running[0].blocks[:1])

    with rig(depth=depth, prefix_caching=False, blocks=40) as engine:
        finished: dict[int, Finished] = run(engine, [broken, *others], act)
    assert finished.pop(77).reason is FinishReason.ERROR
    assert outcome(finished) == outcome(clean)


@pytest.mark.parametrize("depth", [0, 2])
def test_what_a_broken_request_leaves_behind_is_not_found_by_the_next(depth: int, every_model: str) -> None:
    """Its prompt was cached before it broke; the same prompt is computed anew."""
    prompt = range(40, 64)

    def act(engine: Engine, turn: int) -> None:
        if turn == 6:
            (running,) = engine.scheduler.ledger.by_state[State.DECODE].values()
            assert running.published_blocks >= (2 if every_model == "attention" else 0)
            fill_with_nan(engine, running.blocks[:2])

    with rig(depth=depth) as engine:
        broken = run(engine, [request(0, prompt, max_tokens=60, stops=())], act)[0]
        healthy = run(engine, [request(1, prompt, max_tokens=12, stops=())])[1]
        assert engine.counters["prefix_hit_tokens"] == 0
    with rig(depth=0) as engine:
        clean = run(engine, [request(1, prompt, max_tokens=12, stops=())])[1]
    assert broken.reason is FinishReason.ERROR
    assert "not finite" in broken.detail
    assert (healthy.token_ids, healthy.reason) == (clean.token_ids, clean.reason)


@pytest.mark.parametrize("lose", ["evict", "cancel"])
def test_a_request_that_breaks_after_it_has_lost_its_blocks_leaves_nothing_to_find(lose: str, every_model: str) -> None:
    """The step that reads NaN is in flight when its blocks go; what it tells is heard all the same."""
    prompt = range(40, 64)

    def act(engine: Engine, turn: int) -> None:
        if turn not in (6, 7):
            return
        sequence = engine.scheduler.ledger.sequences[0]
        if turn == 6:
            assert sequence.published_blocks >= (2 if every_model == "attention" else 0)
            fill_with_nan(engine, sequence.blocks[:2])
        elif lose == "evict":
            reservation.evict(engine.scheduler.ledger, sequence)
            assert sequence.state is State.EVICTING
        else:
            engine.cancel(0)

    with rig(depth=2) as engine:
        broken = run(engine, [request(0, prompt, max_tokens=60, stops=())], act)[0]
        healthy = run(engine, [request(1, prompt, max_tokens=12, stops=())])[1]
        assert engine.counters["prefix_hit_tokens"] == 0
    with rig(depth=0) as engine:
        clean = run(engine, [request(1, prompt, max_tokens=12, stops=())])[1]
    assert broken.reason is (FinishReason.ERROR if lose == "evict" else FinishReason.CANCELLED)
    assert (healthy.token_ids, healthy.reason) == (clean.token_ids, clean.reason)


@pytest.mark.parametrize(("every_model", "depth"), over_models((1, 2, 4)), indirect=["every_model"])
def test_whoever_shared_a_prompt_with_a_request_that_breaks_is_computed_again(depth: int, every_model: str) -> None:
    """Blocks are shared as soon as the step that writes them is planned: what breaks them tells D steps later."""
    prompt = tuple(range(40, 72))
    requests = [request(i, (*prompt, 90 + i), max_tokens=12, stops=()) for i in range(4)]

    def act(engine: Engine, turn: int) -> None:
        if turn == 1:  # the first one's prompt is launched, nobody else's
            fill_with_nan(engine, engine.scheduler.ledger.sequences[0].blocks[:2])

    with rig(depth=depth, rows=4) as engine:
        finished = run(engine, requests, act)
        counters = engine.counters
    with rig(depth=0, prefix_caching=False) as engine:
        clean = run(engine, requests)
    assert finished.pop(0).reason is FinishReason.ERROR
    del clean[0]
    assert outcome(finished) == outcome(clean)
    assert counters["distrusted"] == (3 if every_model == "attention" else 0)
