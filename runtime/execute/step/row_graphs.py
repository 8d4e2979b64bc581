"""One captured graph a (bucket, sampling variant): a steady decode step is one launch.

Knows: which variants exist, how one is captured without touching a live request, and how many were captured late.
Does not know: what a step computes (it is given as a function), or when it runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from runtime.execute.device.protocol import Device, DeviceError, Graph
from runtime.execute.result_ring import ResultRing, ResultShape
from runtime.execute.sampling.inputs import SamplingVariant

log = logging.getLogger(__name__)


class CaptureError(DeviceError):
    """A graph could not be captured; the text names its rows and the options to change."""


@dataclass(slots=True)
class GraphCounters:
    """``captured``: all graphs; ``after_warmup``: those that a running engine had to wait for. ``warm_up_s``: seconds
    that the others took, kernels compiled for them included. ``bytes``: memory that all graphs shared after that.
    """

    captured: int = 0
    after_warmup: int = 0
    warm_up_s: float = 0.0
    bytes: int = 0


RowWork = Callable[[Tensor, SamplingVariant, int], None]  # of a row map, a variant, and exchange rows


class RowGraphs:
    """The graphs of one role. ``row_maps``: bucket -> its row map (int64 [bucket]) that every replay reads.

    ``work(rows_B, variant, exchange_rows)`` is what is captured; it ends with one append to ``ring``, or reports
    nothing where that is None. Before that it runs once inside ``shortened``, which may leave out what only repeats
    itself (Decoder.few_layers); then what it appended must be of as many rows, of ``width`` tokens and of what the
    variant reports, as the host will read it.
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
        self.name = name
        self._width = width
        self._shortened = shortened
        self.counters = GraphCounters()
        self.around_capture: Callable[[], AbstractContextManager[object]] = nullcontext  # a capture may take seconds
        self._device = device
        self._work = work
        self._ring = ring
        self.row_maps = row_maps
        self._graphs: dict[tuple[int, SamplingVariant, int], Graph] = {}
        self._warm = False
        self.late: dict[str, int] = {}  # captures after warm-up, by sampling variant

    def warm_up(
        self, variants: tuple[SamplingVariant, ...], exchanges: tuple[int, ...] = (), width: int = 1, widest: int = 1
    ) -> None:
        """Capture every bucket of ``variants``, the largest first so that the shared memory pool is sized once.

        With ``exchanges``, the rows of steps in which another group prefills, each bucket once for each of them too.
        ``width``: tokens that a row of this role brings; ``widest``: of the role that another group may run beside it.
        One log line says how many there are, how long they took and what memory they share.
        """
        began = time.perf_counter()
        for bucket in sorted(self.row_maps, reverse=True):
            own = {bucket * width, bucket * widest}
            wider = {*own, *(rows for rows in exchanges if rows > bucket * width)} if exchanges else {0}
            for exchange_rows in sorted(wider, reverse=True):
                for variant in variants:
                    self.get(bucket, variant, exchange_rows)
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

    def get(self, bucket: int, variant: SamplingVariant, exchange_rows: int = 0) -> Graph:
        """The graph of that variant, captured now if it is not there yet. CaptureError names bucket and way out."""
        key = (bucket, variant, exchange_rows)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(*key)
        return graph

    def rehearsals(self, variants: tuple[SamplingVariant, ...]) -> list[Callable[[], None]]:
        """What is captured, uncaptured and over padding: what compiles its kernels. Without exchanges."""
        return [self.rehearsal(bucket, variant) for bucket in self.row_maps for variant in variants]

    def rehearsal(self, bucket: int, variant: SamplingVariant) -> Callable[[], None]:
        """What the capture of one graph runs before it, to be run by itself."""
        return partial(self._rehearse, bucket, variant, 0)

    def _rehearse(self, bucket: int, variant: SamplingVariant, exchange_rows: int) -> None:
        """On padding rows only: a warm-up is real, and live slots must not advance."""
        with self._shortened():
            self._work(self.row_maps[bucket].new_zeros(bucket), variant, exchange_rows)
        if self._ring is not None:
            self._ring.check_latest(ResultShape(bucket, self._width, variant.reported))
            self._ring.undo()

    def _capture(self, bucket: int, variant: SamplingVariant, exchange_rows: int) -> Graph:
        self.counters.captured += 1
        if self._warm:
            self.counters.after_warmup += 1
            self.late[str(variant)] = self.late.get(str(variant), 0) + 1
            if self.late[str(variant)] == 1:
                log.info("first requests with %s: their graphs are captured as they are needed", variant)
        try:
            with self.around_capture():
                return self._device.capture(
                    partial(self._work, self.row_maps[bucket], variant, exchange_rows),
                    name=f"{self.name} of {bucket} rows",
                    warmup=partial(self._rehearse, bucket, variant, exchange_rows),
                    warmups=1,
                )
        except DeviceError as error:
            raise CaptureError(
                f"capturing the {self.name} graph of {bucket} rows failed: {error}. If memory ran out, lower "
                "--memory-fraction, --max-num-seqs or the largest of --decode-buckets"
            ) from error
