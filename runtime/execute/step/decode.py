"""The decode role: one new token for every running row, the whole step one captured graph a bucket.

Knows: what a decode step computes, from slot tables to the result ring, and its graphs.
Does not know: plans, other roles, how rows are gathered and drawn (step_io.py, tail.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.inputs import DecodeAttention, StateRows, StepInputs
from runtime.execute.launch_spec import GREEDY, LaunchSpec
from runtime.execute.role import RoleParts
from runtime.execute.sampling.inputs import KERNEL_VARIANTS, SamplingVariant
from runtime.execute.sampling.prompt_logprobs import StepPromptLogprobs
from runtime.execute.slot_state import PADDING_SLOT
from runtime.execute.step.row_graphs import RowGraphs
from runtime.execute.step.step_io import gather_decode
from runtime.execute.step.tail import Tail
from runtime.schedule.plan import StepKind, StepPlan


class DecodeRole:
    """Serves plans of kind DECODE and width 1."""

    def __init__(self, parts: RoleParts, name: str = "decode") -> None:
        self.name = name
        self._parts = parts
        self._tail = Tail(parts.model, parts.tables, parts.ring)
        maps = {bucket: parts.staging.row_map(self.name, bucket) for bucket in parts.limits.decode_buckets}
        self.graphs = RowGraphs(self.name, parts.device, self.decode, parts.ring, maps)

    def serves(self, plan: StepPlan) -> bool:
        return plan.kind is StepKind.DECODE and plan.width == 1

    def rehearse(self) -> None:
        """Every bucket, the largest first, and that one with every variant that will be warmed up; on a CPU, where
        nothing is compiled or measured, greedy sampling of the largest only.
        """
        device, buckets = self._parts.device.torch_device, self._parts.limits.decode_buckets[::-1]
        steps = [(bucket, GREEDY) for bucket in buckets] + [(buckets[0], v) for v in self._parts.limits.warm_variants]
        for bucket, variant in steps[:1] if device.type == "cpu" else steps:
            self.try_variant(bucket, variant)

    def try_variant(self, bucket: int, variant: SamplingVariant) -> None:
        """Run one step over padding, uncaptured: nothing of it is reported or kept."""
        self.decode(torch.zeros(bucket, dtype=torch.int64, device=self._parts.device.torch_device), variant)
        self._parts.ring.undo()

    def compile_sampling(self) -> None:
        """Run every sampling kernel once in every form, so that no request waits for a compiler.

        Kernels are compiled anew for one row and for numbers of rows that 8 or 16 divide; how many parts a row is cut
        into goes by the number of rows. Nothing on a CPU.
        """
        buckets = self._parts.limits.decode_buckets
        if self._parts.device.torch_device.type == "cpu":
            return
        for rows in sorted({1, 2, 8, *buckets}, reverse=True):
            whole = rows in (1, 2, 8, buckets[-1])
            for variant in KERNEL_VARIANTS if whole else KERNEL_VARIANTS[1:2]:
                self._tail.rehearse(rows, variant)

    def warm_up(self) -> None:
        self.graphs.warm_up(self._parts.limits.warm_variants, self._parts.limits.exchanges)

    def launch(self, spec: LaunchSpec, scores: StepPromptLogprobs | None) -> None:
        self.graphs.get(spec.bucket, spec.variant, spec.exchange_rows).replay()

    def decode(self, rows_B: Tensor, variant: SamplingVariant, exchange_rows: int = 0) -> None:
        """One token for every row of ``rows_B`` (int64 [B], row -> slot); ghost and padding rows are masked.

        ``exchange_rows``: see LaunchSpec.
        """
        parts = self._parts
        rows = gather_decode(parts.tables, rows_B, parts.limits.block_size)
        attention = DecodeAttention(
            page_table_BP=rows.page_table_BP,
            kv_lengths_B=rows.kv_lengths_B,
            query_len=1,
            max_kv_length=rows.page_table_BP.shape[1] * parts.limits.block_size,
        )
        inputs = StepInputs(
            token_ids_T=rows.token_B,
            positions_T=rows.position_B,
            kv_slots_T=rows.kv_slots_B,
            attention=attention,
            real_T=rows.live_B,
            state=StateRows(torch.where(rows.live_B, rows_B, PADDING_SLOT)) if parts.has_slot_state else None,
            exchange_rows=exchange_rows or None,
        )
        hidden_BN = parts.model.forward(inputs, parts.caches)
        self._tail.finish(hidden_BN, rows_B, rows.columns, rows.sampling, variant)
