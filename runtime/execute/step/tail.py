"""The tail of every step: from final hidden states to drawn tokens, written back by slot and appended to the ring.

Knows: the order logits -> draw -> stop check -> write back and append -> count tokens, for one token a row and for a
window of W, and that ranks exchange a few candidates a row where that is exact. Does not know: what a step gathers, the
forward pass, plans, graphs. Everything is graph-safe: fixed shapes, nothing is read by the host.
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
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.execute.step.step_io import write_back
from runtime.execute.step.window_io import Committed, Window, commit_window


class Tail:
    """One a role: its model's head and collectives, over the shared slot tables and result ring."""

    def __init__(self, model: Decoder, tables: SlotTables, ring: ResultRing) -> None:
        self._model = model
        self._tables = tables
        self._ring = ring

    def finish(
        self,
        hidden_BN: Tensor,
        rows_B: Tensor,
        columns: SlotColumns,
        sampling: SamplingInputs,
        variant: SamplingVariant,
    ) -> tuple[Draw, Verdict]:
        """Draw one token for every row, check for the end, write back by slot, report."""
        seen = self._tables.need_seen().select(rows_B) if variant.penalties else None
        edits = edits_of(self._tables.edits, rows_B) if variant.edits else None
        draw, verdict, logprobs = self._draw(self._model.logits(hidden_BN), sampling, variant, seen, edits)
        if variant.penalties:
            count_tokens_(self._tables.need_seen(), rows_B, draw.token_B, verdict.count_B > 0)
        if variant.edits:
            remember_(self._tables.edits, rows_B, draw.token_B, verdict.count_B > 0)
        write_back(self._tables, self._ring, rows_B, columns, draw, verdict, logprobs)
        return draw, verdict

    def finish_window(self, hidden_TN: Tensor, window: Window, width: int, variant: SamplingVariant) -> Committed:
        """Draw at every position of the window, keep what the proposals foresaw and one token more, write back, report.

        hidden_TN: of the window's B * W tokens. A draw depends on its position only, so the tokens kept are those that
        W steps of one token would have drawn; where proposals were drawn (``window.drafted``), tokens as such.
        ``width``: W.
        """
        seen, edits = self._seen_by(window, width, variant)
        local_TV = self._model.logits(hidden_TN)
        if window.drafted is None:
            draw, verdict, logprobs = self._draw(local_TV, window.sampling, variant, seen, edits)
        else:
            draw, verdict, logprobs = self._draw_drafted(local_TV, window, window.drafted, variant, seen, edits)
        committed = commit_window(self._tables, self._ring, window, draw, verdict, width, logprobs)
        accepted = committed.accepted
        for index in range(width if variant.penalties or variant.edits else 0):  # in order: a token may repeat
            gained_B = accepted.count_B > index
            if variant.penalties:
                count_tokens_(self._tables.need_seen(), window.rows_B, accepted.tokens_BW[:, index], gained_B)
            if variant.edits:
                remember_(self._tables.edits, window.rows_B, accepted.tokens_BW[:, index], gained_B)
        return committed

    def _seen_by(
        self, window: Window, width: int, variant: SamplingVariant
    ) -> tuple[SeenTokens | None, RowEdits | None]:
        """What penalties and edits ask of each token of a window: the tokens before it."""
        tokens_BW, tree, seen, edits = window.tokens_BW, window.tree, None, None
        if variant.penalties:
            of_rows = self._tables.need_seen().select(window.rows_B)
            if tree is None:
                seen = seen_in_window(of_rows, tokens_BW[:, 1:])
            else:
                seen = seen_in_tree(of_rows, tokens_BW, generations(tree.parents_BN, width - 1))
        if variant.edits and tree is None:
            edits = edits_in_window(self._tables.edits, window.rows_B, tokens_BW[:, 1:])
        elif variant.edits and tree is not None:
            edits = edits_in_tree(self._tables.edits, window.rows_B, tokens_BW, tree)
        return seen, edits

    def rehearse(self, rows: int, variant: SamplingVariant) -> None:
        """Draw for so many rows of the padding slot, so that the variant's kernels are compiled; writes nothing."""
        model, tables = self._model, self._tables
        records = tables.columns.records
        hidden_BN = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=records.device)
        seen = None
        if variant.penalties:  # tables of the right shape: those of all slots may be large, and nobody needs them yet
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
        window: Window,
        drafted: Drafted,
        variant: SamplingVariant,
        seen: SeenTokens | None,
        edits: RowEdits | None,
    ) -> tuple[Draw, Verdict, TokenLogprobs | None]:
        """By rejection sampling, over whole rows of logits on every rank."""
        logits_TV, sampling = self._model.gather_logits(local_TV), window.sampling
        draw, verdict = draw_window(logits_TV, sampling, variant, window.tokens_BW[:, 1:], drafted, seen, edits)
        logprobs = token_logprobs(logits_TV, draw.token_B, variant.top_logprobs) if variant.logprobs else None
        return draw, verdict, logprobs
