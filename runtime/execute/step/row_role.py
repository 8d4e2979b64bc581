"""What roles of kind DECODE share: a step over running rows, one captured graph a (bucket, sampling variant).

Knows: how such a role is measured, warmed up, tried and launched. Does not know: what its step computes (decode.py,
window.py), other roles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from runtime.execute.launch_spec import GREEDY, LaunchSpec
from runtime.execute.role import RoleParts, Trial
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.prompt_logprobs import StepPromptLogprobs
from runtime.execute.step.row_graphs import RowGraphs
from runtime.schedule.plan import StepKind, StepPlan


class RowRole(ABC):
    """Serves plans of kind DECODE and width ``width``; a subclass says what a step computes."""

    def __init__(self, parts: RoleParts, name: str, width: int) -> None:
        self.name = name
        self.width = width
        self._parts = parts
        self.widens = True  # each bucket is captured for the exchanges of steps with chunks, too
        maps = {bucket: parts.staging.row_map(name, bucket) for bucket in parts.config.decode_buckets}
        self.graphs = RowGraphs(name, parts.device, self.decode, parts.ring, maps, parts.model.few_layers, width)

    @property
    def tokens(self) -> int:
        """Of a row, that go through the model."""
        return self.width

    @abstractmethod
    def decode(self, rows_B: Tensor, variant: SamplingVariant, exchange_rows: int = 0) -> None:
        """One step of rows ``rows_B`` (int64 [B], row -> slot), graph-safe; ghost and padding rows gain nothing.

        It ends with one append to the result ring. ``exchange_rows``: see LaunchSpec.
        """

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        return kind is StepKind.DECODE and plan.width == self.width

    def rehearse(self) -> None:
        """The largest bucket, that one with every variant that will be warmed up, and a layer of each kind of the
        others; on a CPU, where nothing is compiled or measured, greedy sampling of the largest only.
        """
        config = self._parts.config
        largest, *others = config.decode_buckets[::-1]
        self.try_variant(largest, GREEDY)
        if self._parts.device.torch_device.type == "cpu":
            return
        for variant in config.warm_variants:
            self.try_variant(largest, variant)
        with self._parts.model.few_layers():
            for bucket in others:
                self.try_variant(bucket, GREEDY)

    def try_variant(self, bucket: int, variant: SamplingVariant, exchange_rows: int = 0) -> None:
        """Run one step over padding, uncaptured: nothing of it is reported or kept."""
        rows_B = torch.zeros(bucket, dtype=torch.int64, device=self._parts.device.torch_device)
        self.decode(rows_B, variant, exchange_rows)
        self._parts.ring.undo()

    def trials(self, bucket: int, variant: SamplingVariant) -> Sequence[Trial]:
        """The step with all layers: what those with slot state make of a window's tokens is kept to its end. Among
        groups with the widest exchange of its graphs."""
        widest = max(bucket * self._parts.limits.window, *self._exchanges) if self._exchanges else 0
        return [partial(self.try_variant, bucket, variant, widest)]

    @property
    def _exchanges(self) -> tuple[int, ...]:
        """Rows of exchanges for which there are graphs, besides a bucket's own."""
        config = self._parts.config
        return config.exchanges if self.widens else config.exchanges and (0,)  # none that is wider than a bucket

    def warm_up(self) -> None:
        self.graphs.warm_up(self._parts.config.warm_variants, self._exchanges, self.tokens, self._parts.limits.window)

    def launch(self, spec: LaunchSpec, scores: StepPromptLogprobs | None) -> None:
        self.graphs.get(spec.shape.rows, spec.shape.variant, spec.shape.exchange).replay()
