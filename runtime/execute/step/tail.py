"""The tail of every step: from final hidden states to sampled tokens, committed by slot and appended to the ring.

Knows: the order logits -> sample -> stop check -> commit -> update slot features, for rows of one token or of a draft
window, and that ranks exchange a few candidates a row where that is exact. Does not know: what a step gathers, the
forward pass, plans, graphs, what a slot feature does. Everything is graph-safe: fixed shapes, no host read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from models.layers.decoder import Decoder
from runtime.execute.result_ring import ResultRing
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.rejection import Drafted, draw_window
from runtime.execute.sampling.sampler import Draw, Verdict, local_share, merge_shares, sample_and_check
from runtime.execute.slot_state import SlotTables
from runtime.execute.slots.feature import RowView
from runtime.execute.step.commit import Committed, commit
from runtime.execute.step.gather import Rows


class Tail:
    """One per step: its model's head and collectives, over the shared slot tables and result ring."""

    def __init__(self, model: Decoder, tables: SlotTables, ring: ResultRing) -> None:
        self._model = model
        self._tables = tables
        self._ring = ring

    def finish(self, hidden_TN: Tensor, rows: Rows, width: int, variant: SamplingVariant) -> Committed:
        """Sample at every token of ``rows``, commit the accepted draft tokens and one token more, report.

        hidden_TN: of the B * W tokens; ``width``: W. A sample depends on its position only, so the accepted tokens are
        those that W steps of one token would have sampled; if draft tokens were sampled (``rows.drafted``), tokens of
        the same distribution.
        """
        view = RowView(rows.rows_B, rows.tokens_BW, rows.tree, width)
        if width > 1:
            rows = self._limited(rows, view, variant)
        draw, verdict, reported = self._draw(self._model.logits(hidden_TN), rows.sampling, variant, view, rows.drafted)
        committed = commit(self._tables, self._ring, rows, draw, verdict, width, reported)
        self._advance(rows.rows_B, committed.accepted.tokens_BW, committed.accepted.count_B, variant)
        return committed

    def _advance(self, slots_B: Tensor, tokens_BW: Tensor, count_B: Tensor, variant: SamplingVariant) -> None:
        for feature in self._tables.features_of(variant):
            if feature.tables:
                feature.advance(slots_B, tokens_BW, count_B)

    def _limited(self, rows: Rows, view: RowView, variant: SamplingVariant) -> Rows:
        """With a lower limit for some rows; a script keeps those of their draft tokens that are forced."""
        for feature in self._tables.features_of(variant):
            if (most_B := feature.most_tokens(view)) is not None:
                limit_B = most_B if rows.limit_B is None else torch.minimum(most_B, rows.limit_B)
                scripted_B = rows.scripted_B
                if scripted_B is not None:
                    scripted_B = torch.where(most_B < view.width, most_B - 1, scripted_B)
                rows = replace(rows, limit_B=limit_B, scripted_B=scripted_B)
        return rows

    def rehearse(self, rows: Rows, width: int, variant: SamplingVariant) -> None:
        """Sample for ``rows`` of padding, so that the variant's kernels are compiled; writes nothing."""
        model, slots_B, tokens_BW, drafted = self._model, rows.rows_B, rows.tokens_BW, rows.drafted
        shape = tokens_BW.numel(), model.config.hidden_size
        hidden_TN = torch.zeros(shape, dtype=model.dtype, device=slots_B.device)
        view = RowView(slots_B, tokens_BW, rows.tree, width)
        self._draw(model.logits(hidden_TN), rows.sampling, variant, view, drafted)
        if drafted is not None:  # as beside prefill chunks, where some rows have no draft tokens
            drafted = drafted._replace(rows_B=rows.live_BW[:, 0])
            self._draw(model.logits(hidden_TN), rows.sampling, variant, view, drafted)
        self._advance(slots_B, tokens_BW, torch.zeros_like(slots_B, dtype=torch.int32), variant)

    def _draw(
        self, local_TV: Tensor, sampling: SamplingInputs, variant: SamplingVariant, view: RowView,
        drafted: Drafted | None = None,
    ) -> tuple[Draw, Verdict, Sequence[Tensor]]:  # fmt: skip
        """Samples, and what is reported with them. Sampled draft tokens: by rejection sampling, over whole rows of
        logits on every rank."""
        model, features = self._model, self._tables.features_of(variant)
        in_place = not any(one.reads_logits for one in features)
        processors = filter(None, (one.processor(view, in_place) for one in features))
        sampling = replace(sampling, processors=tuple(processors))
        if drafted is None and variant.vocabulary_parallel and model.collectives.size > 1:  # a few candidates a row
            share_BX = local_share(local_TV, model.vocab_shard.start, sampling, variant, model.config.vocab_size)
            shares_BX = model.collectives.all_gather_keys(share_BX, largest=not variant.filters)
            return *merge_shares(shares_BX, sampling, variant), ()
        logits_TV = model.gather_logits(local_TV)
        if drafted is None:
            draw, verdict = sample_and_check(logits_TV, sampling, variant)
        else:
            draw, verdict = draw_window(logits_TV, sampling, variant, view.tokens_BW[:, 1:], drafted)
        reports = (feature.report(logits_TV, draw.token_B, variant) for feature in features)
        return draw, verdict, tuple(chain.from_iterable(reports))
