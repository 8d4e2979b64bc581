"""The CUDA graphs of one part of a step, captured at start-up or when a request first needs one.

Knows: which graphs exist, how one is captured without touching a live request, and how many were captured late.
Does not know: what is captured (a function), when it is replayed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from runtime.execute.device.protocol import Device, DeviceError, Graph
from runtime.execute.result_ring import ResultRing, ResultShape
from runtime.execute.sampling.inputs import SamplingVariant

log = logging.getLogger(__name__)


class CaptureError(DeviceError):
    """A graph could not be captured; the text names its rows or tokens, and the options to change."""


def capture(
    device: Device, work: Callable[[], None], warm_up: Callable[[], None], *, name: str, size: str, way_out: str
) -> Graph:
    """A graph of ``work``, after one run of ``warm_up``. CaptureError names ``size`` and ``way_out``."""
    try:
        return device.capture(work, name=f"{name} of {size}", warmup=warm_up, warmups=1)
    except DeviceError as error:
        raise CaptureError(
            f"capturing the {name} graph of {size} failed: {error}. If memory ran out, lower {way_out}"
        ) from error


@dataclass(slots=True)
class GraphCounters:
    """``captured``: all graphs; ``after_warmup``: those that requests waited for. ``warm_up_s``: seconds for the
    others, compilation included. ``bytes``: memory that all graphs shared after the warm-up.
    """

    captured: int = 0
    after_warmup: int = 0
    warm_up_s: float = 0.0
    bytes: int = 0


Key = tuple[int, SamplingVariant, int]  # rows, variant, rows of each expert all-to-all (0: as many as tokens)
RowWork = Callable[[Tensor, SamplingVariant, int], None]  # of a row map, a variant, all-to-all rows


class RowGraphs(dict[Key, Graph]):
    """Graphs by ``Key``; a missing one is captured on access. ``row_maps``: bucket -> the int64 [bucket] that replays
    read, row -> slot.

    ``work(rows_B, variant, exchange)`` is captured. It appends to ``ring`` once; with None it reports nothing. Before
    the capture it runs once inside ``shortened`` (Decoder.few_layers), over padding; what that run appends must have
    ``width`` tokens a row and what the variant reports, as the host will read it.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        work: RowWork,
        ring: ResultRing | None,
        row_maps: Mapping[int, Tensor],
        shortened: Callable[[], AbstractContextManager[object]] = nullcontext,
        width: int = 1,
    ) -> None:
        super().__init__()
        self.name = name
        self.counters = GraphCounters()
        self.around_capture: Callable[[], AbstractContextManager[object]] = nullcontext  # a capture may take seconds
        self.row_maps = row_maps
        self.late: dict[str, int] = {}  # captures after the warm-up, by sampling variant
        self.work = work
        self._width = width
        self._shortened = shortened
        self._device = device
        self._ring = ring
        self._warm = False

    def warm_up(
        self, variants: Sequence[SamplingVariant], exchanges: Callable[[int], Iterable[int]] = lambda bucket: (0,)
    ) -> None:
        """Capture ``variants`` for every bucket and each of its ``exchanges(bucket)``, the largest first so that the
        shared memory pool is sized once. One log line: number, seconds, memory."""
        began = time.perf_counter()
        for bucket in sorted(self.row_maps, reverse=True):
            for exchange in sorted(exchanges(bucket), reverse=True):
                for variant in variants:
                    self[bucket, variant, exchange]
        self._warm = True
        counters = self.counters
        counters.warm_up_s, counters.bytes = time.perf_counter() - began, self._device.graph_bytes()
        log.info(
            "graphs: %d of %s steps of up to %d rows captured in %.1f s, %.1f MiB of memory shared by all",
            counters.captured,
            self.name,
            max(self.row_maps),
            counters.warm_up_s,
            counters.bytes / (1 << 20),
        )

    def run_over_padding(self, bucket: int, variant: SamplingVariant, exchange: int = 0) -> None:
        """Run a graph's work uncaptured over padding, so that its kernels are compiled; no live slot changes."""
        with self._shortened():
            self.work(self.row_maps[bucket].new_zeros(bucket), variant, exchange)
        if self._ring is not None:
            self._ring.check_latest(ResultShape(bucket, self._width, variant.reported))
            self._ring.undo()

    def __missing__(self, key: Key) -> Graph:
        bucket, variant, exchange = key
        self.counters.captured += 1
        if self._warm:
            self.counters.after_warmup += 1
            self.late[str(variant)] = self.late.get(str(variant), 0) + 1
            if self.late[str(variant)] == 1:
                log.info("first requests with %s: their graphs are captured as they are needed", variant)
        with self.around_capture():
            self[key] = graph = capture(
                self._device,
                partial(self.work, self.row_maps[bucket], variant, exchange),
                partial(self.run_over_padding, *key),
                name=self.name,
                size=f"{bucket} rows",
                way_out="--memory-fraction, --max-num-seqs or the largest of --decode-buckets",
            )
        return graph
