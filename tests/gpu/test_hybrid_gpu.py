"""State of slots on a GPU: cleared, masked and captured without a sync. The recurrence itself is torch's.

What it computes is compared on the twin (tests/runtime/engine/test_hybrid.py).
"""

from __future__ import annotations

import pytest

from models.registry import ARCHITECTURES
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.request import Request
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.test_engine_gpu import EVERYTHING, SHAPE, gpu_rig
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.runtime.engine.rig import request, run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks

pytestmark = pytest.mark.gpu
BUCKETS = pytest.mark.parametrize("buckets", [(16, 32, 48, 64), ()], ids=["graphs", "kernels"])


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)


@BUCKETS
def test_poisoned_state_and_blocks_change_nothing(buckets: tuple[int, ...]) -> None:
    requests = mixture(11)
    with gpu_rig(depth=2, shape=SHAPE | HYBRID, prefill_buckets=buckets) as engine:
        clean = run(engine, requests)
    with gpu_rig(depth=2, shape=SHAPE | HYBRID, prefill_buckets=buckets) as engine:

        def poison(_: object, turn: int) -> None:
            on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
            fill_with_nan(engine, idle_blocks(engine))

        assert outcome(run(engine, requests, poison)) == outcome(clean)
        assert engine.counters["ghost_rows"] > 0


def test_a_fork_of_a_parked_session_computes_nothing_again() -> None:
    """Copies of state and of a block, in a step without rows; nothing waits for them, and nothing is captured."""
    said: dict[int, list[int]] = {0: [], 7: []}

    def rest() -> None:
        while engine.has_work:
            output = engine.step()
            for row, (id_, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
                if count and id_ >= 0:
                    said[id_] += output.tokens[row * output.width : row * output.width + count]

    with gpu_rig(depth=2, shape=SHAPE | HYBRID, max_sessions=2) as engine:
        engine.start(request(0, range(3, 24), max_tokens=20, stops=()), 7, keep=True)
        rest()
        computed = engine.counters["prefill_tokens"]
        with no_synchronisation():
            engine.fork(7, 0)
            rest()
            engine.proceed(7, 1, 20)
            engine.proceed(0, 1, 20)
            rest()
        assert (len(said[0]), said[7]) == (20, said[0][7:])
        assert engine.counters["prefill_tokens"] == computed
        assert engine.counters["graph_captures_after_warmup"] == 0
        for id_ in (0, 7):
            engine.cancel(id_)
        rest()


@BUCKETS
def test_no_step_synchronises(buckets: tuple[int, ...]) -> None:
    variants = (SamplingVariant(), EVERYTHING)
    with gpu_rig(depth=2, shape=SHAPE | HYBRID, prefill_buckets=buckets, variants=variants) as engine:
        requests = mixture(3)
        run(engine, requests)  # lazily captured variants are captured here
        again = [Request(100 + r.request_id, r.prompt_token_ids, r.sampling, r.stop_token_ids) for r in requests]
        with no_synchronisation():
            assert len(run(engine, again)) == len(requests)
