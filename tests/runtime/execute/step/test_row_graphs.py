"""Captured decode steps: how many there are and what they cost is told, and one that fails says what to do."""

from __future__ import annotations

import logging

import pytest
import torch

from runtime.execute.device.cpu_twin import TwinDevice, TwinGraph
from runtime.execute.device.protocol import DeviceError, Work
from runtime.execute.sampling.inputs import SamplingVariant
from tests.runtime.engine.rig import request, rig, run

BUCKETS = (1, 2, 4)
FULL = "CUDA out of memory. Tried to allocate 64.00 MiB"


class SmallDevice(TwinDevice):
    """Memory runs out in the capture of ``fails``; all graphs together keep 3 MiB."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails = fails

    def capture(self, work: Work, *, name: str, warmup: Work | None = None, warmups: int = 2) -> TwinGraph:
        def out_of_memory() -> None:
            raise torch.OutOfMemoryError(FULL)

        return super().capture(work, name=name, warmup=out_of_memory if name == self.fails else warmup, warmups=warmups)

    def graph_bytes(self) -> int:
        return 3 << 20


@pytest.mark.parametrize("rows", BUCKETS)
def test_memory_that_runs_out_at_a_capture_names_the_bucket_and_the_options(rows: int) -> None:
    device = SmallDevice(fails=f"decode of {rows} rows")
    with pytest.raises(DeviceError) as caught, rig(rows=4, buckets=BUCKETS, device=device):
        pass
    message = str(caught.value)
    assert f"capturing the decode graph of {rows} rows failed" in message
    assert FULL in message
    for option in ("--memory-fraction", "--max-num-seqs", "--decode-buckets"):
        assert option in message


def test_the_cost_of_all_graphs_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    variants = (SamplingVariant(), SamplingVariant(random=True))
    with (
        caplog.at_level(logging.INFO, "runtime.execute.step.graphs"),
        rig(rows=4, buckets=BUCKETS, device=SmallDevice(), variants=variants) as engine,
    ):
        counters = engine.executor.decode.graphs.counters
        (told,) = [record.getMessage() for record in caplog.records]
        assert told.startswith("graphs: 6 of decode steps of up to 4 rows captured in ")
        assert told.endswith(" s, 3.0 MiB of memory shared by all")
        assert (counters.captured, counters.after_warmup, counters.bytes) == (6, 0, 3 << 20)
        assert counters.warm_up_s > 0


def test_a_variant_that_nobody_warmed_up_is_captured_once_a_bucket_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = [request(i, (5, 6, 7 + i), temperature=1.0, max_tokens=3) for i in range(2)]
    with rig(rows=4, buckets=BUCKETS) as engine, caplog.at_level(logging.INFO, "runtime.execute.step.graphs"):
        run(engine, late)
        assert (
            engine.counters["graph_captures_after_warmup"] == engine.executor.decode.graphs.counters.after_warmup == 1
        )
        run(engine, [request(9, (5, 6), temperature=0.5, max_tokens=3)])
        assert engine.counters["graph_captures_after_warmup"] == 2
        run(engine, late)
        assert engine.counters["graph_captures_after_warmup"] == 2
        assert engine.counters["late_captures{random}"] == 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "first requests with random: their graphs are captured as they are needed"
