"""What a proposer is shown of a step: its tokens, hidden states and successors, laid out as Observed.

Knows: how the rows of windows, of one-token steps and of prompts' chunks become observed tokens, and which of them
count. Does not know: what a proposer makes of them, the forward pass, the draw. Everything is graph-safe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.inputs import DecodeAttention, StepInputs
from models.layers.layer_tap import LayerTap
from runtime.execute.proposer import Advanced, Observed, observes
from runtime.execute.role import RoleParts
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.slot_state import NEWEST
from runtime.execute.staging import Chunks
from runtime.execute.step.step_io import Packed
from runtime.execute.step.step_io_kernels import kernels_for
from runtime.execute.step.window_io import Shown, Window
from runtime.schedule.plan import PADDING_SLOT, TRASH_BLOCK


class ProposerFeed:
    """One a role. Without a proposer that looks, ``on`` is False, ``tap`` None, and nothing may be shown."""

    def __init__(self, parts: RoleParts) -> None:
        self._tables = parts.tables
        self._proposer = proposer = parts.proposer
        self.on = observes(proposer)
        self.tap = LayerTap(proposer.layers) if proposer is not None and proposer.layers else None

    @property
    def reads_hidden(self) -> bool:
        """Whether it is shown the final hidden states of all tokens, those within chunks included."""
        return self._proposer is not None and self._proposer.reads_hidden

    @property
    def features_TF(self) -> Tensor | None:
        """Of the latest forward pass that was given ``tap``."""
        return None if self.tap is None else self.tap.features_TF

    def show_window(
        self, inputs: StepInputs, window: Window, hidden_TN: Tensor, features_TF: Tensor | None, shown: Shown
    ) -> None:
        """The B * W tokens of a window, behind its draw: those before a row's last one were kept, and that one drew.

        Of a tree those of the path that was drawn, whose entries lie where a chain's would.
        """
        width = len(shown.slots_T) // len(window.rows_B)
        seen_TN = hidden_TN if self.reads_hidden else None
        if shown.path_T is not None:
            inputs = _along_path(inputs, window, shown, width)
            seen_TN = None if seen_TN is None else seen_TN.index_select(0, shown.path_T)
            features_TF = None if features_TF is None else features_TF.index_select(0, shown.path_T)
        advanced = Advanced(window.rows_B, shown.last_B, shown.gained_B, width)
        own = shown.slots_T, shown.next_T, shown.kept_T, shown.kept_kv_slots_T
        self._show(Observed(inputs, *own, seen_TN, features_TF, advanced))

    def show_rows(
        self,
        inputs: StepInputs,
        rows_B: Tensor,
        hidden_BN: Tensor,
        features_BF: Tensor | None,
        draw: Draw,
        verdict: Verdict,
    ) -> None:
        """The newest token of every row, behind the draw of its successor."""
        kernels = kernels_for(rows_B)
        gained_B, kept_B, last_B = (show_in_torch if kernels is None else kernels.show)(
            verdict.count_B, inputs.kv_slots_T
        )
        advanced = Advanced(rows_B, last_B, gained_B, 1)
        self._show(Observed(inputs, rows_B, draw.token_B, gained_B, kept_B, hidden_BN, features_BF, advanced))

    def show_chunks(self, inputs: StepInputs, chunks: Chunks, packed: Packed, hidden_TN: Tensor | None) -> None:
        """The tokens of a step with chunks whose successors are known before its draw: all of them but each row's
        newest. Rows that decode, and the last tokens of last chunks, come behind the draw (``show_rows``)."""
        history_SL = self._tables.history_SL
        assert history_SL is not None  # an executor with a proposer keeps histories
        slots_T = chunks.slots_T
        next_T = (packed.positions_T + 1).clamp(max=history_SL.shape[1] - 1)
        known_T = next_T < self._tables.columns.length[slots_T]
        kept_T = known_T & (slots_T != PADDING_SLOT) & (chunks.positions_T > NEWEST)
        next_ids_T = history_SL[slots_T, next_T].to(torch.int64)
        kept_kv_slots_T = torch.where(kept_T, inputs.kv_slots_T, TRASH_BLOCK)
        self._show(Observed(inputs, slots_T, next_ids_T, kept_T, kept_kv_slots_T, hidden_TN, self.features_TF))

    def _show(self, observed: Observed) -> None:
        assert self._proposer is not None
        self._proposer.observe(observed)


def _along_path(inputs: StepInputs, window: Window, shown: Shown, width: int) -> StepInputs:
    """Of W tokens a row, a path through its tree, as if they had been a chain."""
    bound = inputs.attention
    assert isinstance(bound, DecodeAttention)  # of a window
    attention = DecodeAttention(
        page_table_BP=window.page_table_BP,
        kv_lengths_B=window.kv_lengths_B - (window.tokens - width),
        query_len=width,
        max_kv_length=bound.max_kv_length,
    )
    return StepInputs(shown.token_ids_T, shown.positions_T, shown.kv_slots_T, attention)


def show_in_torch(count_B: Tensor, kv_slots_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of step_io_triton.show."""
    gained_B = count_B > 0
    return gained_B, torch.where(gained_B, kv_slots_B, TRASH_BLOCK), torch.arange(len(count_B), device=count_B.device)
