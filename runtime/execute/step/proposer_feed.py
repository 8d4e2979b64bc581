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
from runtime.execute.sampling.acceptance import Acceptance
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.slot_state import NEWEST
from runtime.execute.staging import Chunks
from runtime.execute.step.step_io import Packed, Window
from runtime.schedule.plan import PADDING_SLOT


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
        self,
        inputs: StepInputs,
        window: Window,
        hidden_TN: Tensor,
        features_TF: Tensor | None,
        accepted: Acceptance,
    ) -> None:
        """The B * W tokens of a window, behind its draw: those before a row's last one were kept, and that one drew.

        Of a tree those of the path that was drawn, whose entries lie where a chain's would.
        """
        width, device = accepted.tokens_BW.shape[1], hidden_TN.device
        if accepted.nodes_BW is not None:
            inputs, path_T = _along_path(inputs, window, accepted.nodes_BW)
            hidden_TN = hidden_TN.index_select(0, path_T)
            features_TF = None if features_TF is None else features_TF.index_select(0, path_T)
        kept_BW = torch.arange(width, device=device) < accepted.count_B[:, None]
        first_B = torch.arange(len(window.rows_B), device=device) * width
        last_B = first_B + (accepted.count_B.to(torch.int64) - 1).clamp(min=0)
        slots_T = window.rows_B.repeat_interleave(width)
        advanced = Advanced(window.rows_B, last_B, accepted.count_B > 0, width)
        next_T, kept_T = accepted.tokens_BW.reshape(-1), kept_BW.reshape(-1)
        self._show(Observed(inputs, slots_T, next_T, kept_T, hidden_TN, features_TF, advanced))

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
        gained_B = verdict.count_B > 0
        advanced = Advanced(rows_B, torch.arange(len(rows_B), device=rows_B.device), gained_B, 1)
        self._show(Observed(inputs, rows_B, draw.token_B, gained_B, hidden_BN, features_BF, advanced))

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
        self._show(Observed(inputs, slots_T, next_ids_T, kept_T, hidden_TN, self.features_TF))

    def _show(self, observed: Observed) -> None:
        assert self._proposer is not None
        self._proposer.observe(observed)


def _along_path(inputs: StepInputs, window: Window, nodes_BW: Tensor) -> tuple[StepInputs, Tensor]:
    """Inputs of W tokens a row, a path through its tree, as if they had been a chain; and which tokens those are."""
    rows, width = nodes_BW.shape
    tokens = window.tokens
    path_T = (torch.arange(rows, device=nodes_BW.device)[:, None] * tokens + nodes_BW).reshape(-1)
    bound = inputs.attention
    assert isinstance(bound, DecodeAttention)  # of a window
    attention = DecodeAttention(
        page_table_BP=window.page_table_BP,
        kv_lengths_B=window.kv_lengths_B - (tokens - width),
        query_len=width,
        max_kv_length=bound.max_kv_length,
    )
    path = StepInputs(
        token_ids_T=inputs.token_ids_T.index_select(0, path_T),
        positions_T=inputs.positions_T.index_select(0, path_T),
        kv_slots_T=window.kv_slots_BW[:, :width].reshape(-1),
        attention=attention,
    )
    return path, path_T
