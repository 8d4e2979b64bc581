"""The tail of every step: from final hidden states to sampled tokens, committed by slot and appended to the ring.

Knows: the order logits -> sample -> stop check -> commit -> count tokens, for rows of one token or of a draft window,
and that ranks exchange a few candidates a row where that is exact. Does not know: what a step gathers, the forward
pass, plans, graphs. Everything is graph-safe: fixed shapes, no host read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers.decoder import Decoder
from runtime.execute.result_ring import ResultRing
from runtime.execute.sampling.draft_tree import generations
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.logit_edits import RowEdits, edits_in_tree, edits_in_window, edits_of, remember_
from runtime.execute.sampling.logprobs import TokenLogprobs, token_logprobs
from runtime.execute.sampling.penalties import SeenTokens, count_tokens_, seen_in_tree, seen_in_window
from runtime.execute.sampling.rejection import Drafted, draw_window
from runtime.execute.sampling.sampler import Draw, Verdict, local_share, merge_shares, sample_and_check
from runtime.execute.slot_state import SlotTables
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
        seen, edits = self._seen_by(rows, width, variant)
        local_TV = self._model.logits(hidden_TN)
        if rows.drafted is None:
            draw, verdict, logprobs = self._draw(local_TV, rows.sampling, variant, seen, edits)
        else:
            draw, verdict, logprobs = self._draw_drafted(local_TV, rows, rows.drafted, variant, seen, edits)
        committed = commit(self._tables, self._ring, rows, draw, verdict, width, logprobs)
        accepted = committed.accepted
        for index in range(width if variant.penalties or variant.edits else 0):  # in order: a token may repeat
            gained_B = accepted.count_B > index
            if variant.penalties:
                count_tokens_(self._tables.need_seen(), rows.rows_B, accepted.tokens_BW[:, index], gained_B)
            if variant.edits:
                remember_(self._tables.edits, rows.rows_B, accepted.tokens_BW[:, index], gained_B)
        return committed

    def _seen_by(self, rows: Rows, width: int, variant: SamplingVariant) -> tuple[SeenTokens | None, RowEdits | None]:
        """What penalties and logit edits need at each token: the tokens before it."""
        tokens_BW, tree, seen, edits = rows.tokens_BW, rows.tree, None, None
        if variant.penalties:
            seen = self._tables.need_seen().select(rows.rows_B)
            if tree is not None:
                seen = seen_in_tree(seen, tokens_BW, generations(tree.parents_BN, width - 1))
            elif width > 1:
                seen = seen_in_window(seen, tokens_BW[:, 1:])
        if variant.edits:
            if tree is not None:
                edits = edits_in_tree(self._tables.edits, rows.rows_B, tokens_BW, tree)
            elif width > 1:
                edits = edits_in_window(self._tables.edits, rows.rows_B, tokens_BW[:, 1:])
            else:
                edits = edits_of(self._tables.edits, rows.rows_B)
        return seen, edits

    def rehearse(self, rows: int, variant: SamplingVariant) -> None:
        """Sample for ``rows`` rows of padding, so that the variant's kernels are compiled; writes nothing."""
        model, tables = self._model, self._tables
        records = tables.columns.records
        hidden_BN = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=records.device)
        seen = None
        if variant.penalties:  # of padding alone: the tables of all slots may be large, and are not needed yet
            shape = (rows, tables.vocab_size)
            counts = torch.zeros(shape, dtype=torch.int16, device=records.device)
            seen = SeenTokens(counts, torch.zeros(shape, dtype=torch.bool, device=records.device))
        padding_B = torch.zeros(rows, dtype=torch.int64, device=records.device)
        edits = edits_of(tables.edits, padding_B) if variant.edits else None
        self._draw(model.logits(hidden_BN), tables.gather(padding_B).sampling(), variant, seen, edits)

    def _draw(
        self,
        local_BV: Tensor,
        sampling: SamplingInputs,
        variant: SamplingVariant,
        seen: SeenTokens | None,
        edits: RowEdits | None,
    ) -> tuple[Draw, Verdict, TokenLogprobs | None]:
        collectives = self._model.collectives
        if variant.vocabulary_parallel and collectives.size > 1:  # exchange a few candidates a row, not all logits
            shard = self._model.vocab_shard
            if seen is not None:
                seen = SeenTokens(seen.counts[:, shard.start : shard.end], seen.prompt[:, shard.start : shard.end])
            share_BX = local_share(local_BV, shard.start, sampling, variant, seen, self._model.config.vocab_size, edits)
            shares_BX = collectives.all_gather_keys(share_BX, largest=not variant.filters)
            return *merge_shares(shares_BX, sampling, variant), None
        logits_BV = self._model.gather_logits(local_BV)
        draw, verdict = sample_and_check(logits_BV, sampling, variant, seen, edits)
        logprobs = token_logprobs(logits_BV, draw.token_B, variant.top_logprobs) if variant.logprobs else None
        return draw, verdict, logprobs

    def _draw_drafted(
        self,
        local_TV: Tensor,
        rows: Rows,
        drafted: Drafted,
        variant: SamplingVariant,
        seen: SeenTokens | None,
        edits: RowEdits | None,
    ) -> tuple[Draw, Verdict, TokenLogprobs | None]:
        """By rejection sampling, over whole rows of logits on every rank."""
        logits_TV, sampling = self._model.gather_logits(local_TV), rows.sampling
        draw, verdict = draw_window(logits_TV, sampling, variant, rows.tokens_BW[:, 1:], drafted, seen, edits)
        logprobs = token_logprobs(logits_TV, draw.token_B, variant.top_logprobs) if variant.logprobs else None
        return draw, verdict, logprobs
