"""The engine's counters count what their names say, on the CPU twin's real masking, staging and memory."""

from __future__ import annotations

import pytest

from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.sampling.inputs import SamplingVariant
from tests.runtime.engine.rig import request, rig, run

DEPTHS = (0, 1, 2, 4)


def fourth_token() -> int:
    """The fourth token of the greedy answer to (1, 2, 3), which is not among those before it."""
    with rig() as engine:
        *before, fourth = run(engine, [request(0, (1, 2, 3), max_tokens=4, stops=())])[0].token_ids
    assert fourth not in before
    return fourth


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_that_stops_on_the_device_leaves_masked_ghosts(depth: int) -> None:
    """D steps were launched behind the one that stopped; their rows compute nothing, so nothing is wasted."""
    with rig(depth=depth) as engine:
        run(engine, [request(0, (1, 2, 3), max_tokens=30, stops=(fourth_token(),))])
        assert (engine.counters["ghost_rows"], engine.counters["wasted_tokens"]) == (depth, 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cancelled_row_wastes_what_is_in_flight(depth: int) -> None:
    """The device does not know of the cancel: the D tokens on their way are dropped by the host."""
    with rig(depth=depth) as engine:
        engine.add(request(0, (1, 2, 3), max_tokens=30, stops=()))
        for _ in range(depth + 3):
            engine.step()
        engine.cancel(0)
        run(engine, [])
        assert (engine.counters["ghost_rows"], engine.counters["wasted_tokens"]) == (depth, depth)


def test_an_end_by_length_is_foreseen() -> None:
    with rig() as engine:
        run(engine, [request(0, (1, 2, 3), max_tokens=12, stops=())])
        assert (engine.counters["ghost_rows"], engine.counters["wasted_tokens"]) == (0, 0)


def test_blocks_are_fenced_while_a_step_may_touch_them() -> None:
    with rig(depth=2, block_size=8) as engine:
        engine.add(request(0, range(1, 18), max_tokens=30, stops=()))
        for _ in range(6):
            engine.step()
        assert engine.counters["fenced_blocks"] == 0
        engine.cancel(0)
        engine.step()
        assert engine.counters["fenced_blocks"] == 3, "17 + 4 landed tokens and those in flight lie in 3 blocks of 8"
        run(engine, [])
        assert engine.counters["fenced_blocks"] == 0


def test_a_graph_captured_late_is_counted() -> None:
    plain, asks = request(0, (1, 2, 3)), request(1, (1, 2, 3), logprobs=2)
    with rig() as engine:
        run(engine, [plain])
        assert engine.counters["graph_captures_after_warmup"] == 0
        run(engine, [asks])
        assert engine.counters["graph_captures_after_warmup"] == 1, "one bucket, one new variant"
    warm = (SamplingVariant(), SamplingVariant.covering([asks.sampling]))
    with rig(variants=warm) as engine:
        run(engine, [plain, asks])
        assert engine.counters["graph_captures_after_warmup"] == 0


def test_memory_taken_late_is_counted() -> None:
    """Tables of seen tokens that are large for the card wait for the first penalised request."""
    small = TwinDevice(memory_bytes=2_000_000)
    with rig(blocks=40, device=small, shape={"vocab_size": 2111}) as engine:
        run(engine, [request(0, (1, 2, 3))])
        assert engine.counters["device_allocs_after_warmup"] == 0
        run(engine, [request(1, (1, 2, 3), presence_penalty=0.5)])
        assert engine.counters["device_allocs_after_warmup"] > 0
        taken = engine.counters["device_allocs_after_warmup"]
        run(engine, [request(2, (1, 2, 3), presence_penalty=0.5)])
        assert engine.counters["device_allocs_after_warmup"] == taken


def test_bytes_to_the_device_are_those_of_changes() -> None:
    """An admission sends its slot; a steady step nothing; a new block 16 bytes of table (two 8-byte cells, aligned)."""
    with rig(depth=2, block_size=32) as engine:
        engine.add(request(0, range(1, 9), max_tokens=60, stops=()))
        sent, copies = [], []
        for _ in range(40):
            before = engine.counters
            engine.step()
            sent.append(engine.counters["host_to_device_bytes"] - before["host_to_device_bytes"])
            copies.append(engine.counters["host_to_device_copies"] - before["host_to_device_copies"])
        assert all((size > 0) == (count == 1) for size, count in zip(sent, copies, strict=True))
        first, mapped, *steady = sent
        assert first > mapped > 0
        assert sum(size > 0 for size in steady) == 1, "one boundary in 40 tokens"
        assert max(steady) < mapped + first
