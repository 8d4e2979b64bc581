"""The record of what a measurement was made on: what the engine's start came to is part of it."""

from __future__ import annotations

import msgspec

from launch.bench.environment import engine_facts, environment
from launch.ranks.rendezvous import discover
from runtime.execute.sampling.inputs import SamplingVariant
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.execute.step.test_row_graphs import BUCKETS, SmallDevice


def test_graphs_and_memory_of_the_engine_are_on_record() -> None:
    variants = (SamplingVariant(), SamplingVariant(random=True))
    with rig(rows=4, buckets=BUCKETS, blocks=40, device=SmallDevice(), variants=variants) as engine:
        run(engine, [request(0, (5, 6), max_tokens=3, logprobs=1)])
        assert engine.counters["graph_captures_after_warmup"] == 1
        facts = engine_facts(engine)
        record = environment(engine.config, discover({}), facts)
        block_bytes = engine.executor.sizing.shape.block_bytes
    assert facts["graph_seconds"] > 0
    rest: dict[str, object] = {"prefill_attention": "reference", "chain_depth": 2, "horizon": 0}
    rest |= {"graph_bytes": 3 << 20, "kv_blocks": 40, "kv_bytes": 41 * block_bytes, "activation_bytes": 0}
    assert facts == {"graphs_captured": 6, "graph_seconds": facts["graph_seconds"], **rest}
    assert msgspec.json.decode(msgspec.json.encode(record))["engine"] == facts
