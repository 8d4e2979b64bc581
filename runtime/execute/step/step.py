"""What one step does on the device, from slot tables to result ring: the work a graph captures.

Knows: the order gather -> forward -> logits -> draw -> stop check -> write back by slot -> append to the ring.
Does not know: what is gathered and written back (step_io.py), plans, streams, capture (decode_graphs.py), or how the
tables got their contents (staging.py).
Everything here is graph-safe: fixed shapes, device tensors in and out, nothing read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention, RepeatedPrefill, StepInputs
from models.layers.decoder import Decoder
from runtime.execute.device.protocol import Device
from runtime.execute.landing import ResultRing
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.logprobs import TokenLogprobs, token_logprobs
from runtime.execute.sampling.penalties import SeenTokens, count_tokens_
from runtime.execute.sampling.prompt_logprobs import StepPromptLogprobs
from runtime.execute.sampling.sampler import Draw, Verdict, local_best, merge_and_check, sample_and_check
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.execute.staging import Chunks
from runtime.execute.step.step_io import gather_decode, write_back


class StepWork:
    """The device side of steps over one model, one set of slot tables, one KV pool and one result ring."""

    def __init__(
        self, model: Decoder, kv_layers: Sequence[Tensor], tables: SlotTables, ring: ResultRing, block_size: int
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers
        self._tables = tables
        self._ring = ring
        self._block_size = block_size

    def decode(self, rows_B: Tensor, features: SamplingVariant, exchange_rows: int = 0) -> None:
        """One token for every row of ``rows_B`` (int64 [B], row -> slot); ghost and padding rows are masked.

        ``exchange_rows``: see StepPlan.
        """
        rows = gather_decode(self._tables, rows_B, self._block_size)
        attention = DecodeAttention(
            page_table_BP=rows.page_table_BP,
            kv_lengths_B=rows.kv_lengths_B,
            query_len=1,
            max_kv_length=rows.page_table_BP.shape[1] * self._block_size,
        )
        inputs = StepInputs(
            token_ids_T=rows.token_B,
            positions_T=rows.position_B,
            kv_slots_T=rows.kv_slots_B,
            attention=attention,
            real_T=rows.live_B,
            exchange_rows=exchange_rows or None,
        )
        hidden_BN = self._model.forward(inputs, self._kv_layers)
        self._finish(hidden_BN, rows_B, rows.columns, rows.sampling, features)

    def prefill(
        self,
        chunks: Chunks,
        query_lengths: tuple[int, ...],
        kv_lengths: tuple[int, ...],
        features: SamplingVariant,
        scores: StepPromptLogprobs | None = None,
        exchange_rows: int = 0,
    ) -> None:
        """Chunks of prompts, packed; rows whose chunk is the last draw their first token, the others produce nothing.

        ``query_lengths`` and ``kv_lengths`` (tokens of KV after the chunk) are the host's: prompts are known there.
        ``scores`` receives the log-probabilities of ``chunks.scored_2S``; None when there are none.
        """
        attention = PrefillAttention(self._tables.gather_blocks(chunks.slots_R), query_lengths, kv_lengths)
        scored_2S = None if scores is None else chunks.scored_2S
        hidden = self.prefill_hidden(chunks, attention, exchange_rows, every_token=scored_2S is not None)
        if scores is not None and scored_2S is not None:
            scores.fill(hidden, scored_2S, lambda h_RN: self._model.gather_logits(self._model.logits(h_RN)))
            hidden = hidden.index_select(0, chunks.logit_rows_R)
        self.finish_prefill(hidden, chunks, features)

    def repeat_prefill(self, page_table_BP: Tensor, max_tokens: int) -> RepeatedPrefill | None:
        """Attention for captured prefill steps over this KV pool; see Kernels.repeat_prefill."""
        return self._model.repeat_prefill(page_table_BP, max_tokens, self._kv_layers[0])

    def empty_hidden(self, device: Device, rows: int) -> Tensor:
        """Room for what ``prefill_hidden`` returns of so many rows."""
        return device.zeros(rows, self._model.config.hidden_size, dtype=self._model.dtype)

    def prefill_hidden(
        self, chunks: Chunks, attention: PrefillAttention, exchange_rows: int = 0, *, every_token: bool = False
    ) -> Tensor:
        """The part of a prefill step that depends on no row's parameters: final hidden states of each row's last token
        [R, N], or of every token [T, N]."""
        positions_T, size = chunks.positions_T, self._block_size
        pages_T = self._tables.block_table_SP[chunks.slots_T, positions_T // size].to(torch.int64)
        inputs = StepInputs(
            token_ids_T=chunks.token_ids_T,
            positions_T=positions_T,
            kv_slots_T=pages_T * size + positions_T % size,
            attention=attention,
            logit_rows_R=None if every_token else chunks.logit_rows_R,
            exchange_rows=exchange_rows or None,
        )
        return self._model.forward(inputs, self._kv_layers)

    def finish_prefill(self, hidden_RN: Tensor, chunks: Chunks, features: SamplingVariant) -> None:
        """The rest of it: the first tokens of rows whose chunk is the last."""
        columns = self._tables.gather(chunks.emitting_R)
        self._finish(hidden_RN, chunks.emitting_R, columns, columns.sampling(), features)

    def _finish(
        self,
        hidden_BN: Tensor,
        rows_B: Tensor,
        columns: SlotColumns,
        sampling: SamplingInputs,
        features: SamplingVariant,
    ) -> None:
        """Draw, check for the end, write back by slot, report."""
        draw, verdict, logprobs = self._draw(self._model.logits(hidden_BN), rows_B, sampling, features)
        if features.penalties:
            count_tokens_(self._seen(), rows_B, draw.token_B, verdict.count_B > 0)
        write_back(self._tables, self._ring, rows_B, columns, draw, verdict, logprobs)

    def _draw(
        self, local_BV: Tensor, rows_B: Tensor, sampling: SamplingInputs, features: SamplingVariant
    ) -> tuple[Draw, Verdict, TokenLogprobs | None]:
        seen = self._seen().select(rows_B) if features.penalties else None
        collectives = self._model.collectives
        if features.vocabulary_parallel and collectives.size > 1:  # exchange one candidate a row, not all logits
            shard = self._model.vocab_shard
            if seen is not None:
                seen = SeenTokens(seen.counts[:, shard.start : shard.end], seen.prompt[:, shard.start : shard.end])
            best_B = local_best(local_BV, shard.start, sampling, features, seen, self._model.config.vocab_size)
            return *merge_and_check(collectives.all_gather(best_B[:, None]), rows=sampling), None
        logits_BV = self._model.gather_logits(local_BV)
        draw, verdict = sample_and_check(logits_BV, sampling, features, seen)
        logprobs = token_logprobs(logits_BV, draw.token_B, features.top_logprobs) if features.logprobs else None
        return draw, verdict, logprobs

    def _seen(self) -> SeenTokens:
        return self._tables.need_seen()
