"""A serial engine in miniature: token lists in, greedy tokens and their logits out, over a paged KV cache.

Knows: pages, slots, chunks, shared prefixes and padding rows, enough to build every kind of StepInputs.
Does not know: the runtime, which does the same with slots and schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention, StateRows, StepInputs
from models.layers.decoder import Decoder
from tests.models.kv_layers import caches_of

MOST_ROWS = 16  # sequences at a time, of models that keep state in slots


@dataclass
class Row:
    """One sequence: ``cached`` of its tokens have their KV in ``pages``; ``logits`` [V] of each token it drew.

    While ``forced`` holds tokens, the first of them is taken instead of the most likely one.
    """

    tokens: list[int]
    pages: list[int]
    slot: int = 0
    cached: int = 0
    forced: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class PagedDriver:
    """Generates for a batch at a time; all ranks of a group run the same calls. Page 0 is the trash page."""

    def __init__(self, model: Decoder, pages: int, page_size: int = 4, device: str = "cpu") -> None:
        self.model = model
        self.device = device
        self.page_size = page_size
        self.free = list(range(pages - 1, 0, -1))  # handed out in falling order: neighbours are not adjacent
        self.caches = caches_of(model.cache_layout, pages, page_size, 1 + MOST_ROWS, device)
        self.kv_layers = [cache for cache in self.caches if isinstance(cache, Tensor)]
        self._stateful = model.cache_layout.has_slot_state

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        chunk: int | None = None,
        share_prefixes: bool = False,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> list[Row]:
        """Greedy completions, or ``forced`` ones, so that inexact arithmetic can be followed along another's tokens.

        ``chunk`` bounds a prompt's tokens a step; ``share_prefixes`` computes the first prompt alone and lets the
        others reuse its full pages as far as they begin the same, where all that is kept of a prefix is in pages. Pages
        and slots return to the pool.
        """
        rows = [
            Row(list(prompt), self._pages_for(len(prompt) + new_tokens), slot=1 + number)
            for number, prompt in enumerate(prompts)
        ]
        self._reset_state()
        for row, completion in zip(rows, forced or (), strict=False):
            row.forced = list(completion)
        taken = [page for row in rows for page in row.pages]
        if share_prefixes:
            self._prefill(rows[:1], chunk)
        if share_prefixes and not self._stateful:
            for row in rows[1:]:
                self._share(rows[0], row)
        self._prefill(rows[1:] if share_prefixes else rows, chunk)
        for _ in range(new_tokens - 1):
            self._decode(rows)
        self.free.extend(taken)
        return rows

    def _reset_state(self) -> None:
        """Of all slots: zeros where a sequence is seated; of the null slot NaN, which nobody may see."""
        for cache in self.caches:
            if isinstance(cache, dict):
                for bank in cache.values():
                    bank.zero_()
                    bank[0] = float("nan")

    def _pages_for(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.page_size))]

    def _share(self, source: Row, row: Row) -> None:
        # The last prompt token is always computed: its logits are needed.
        same = 0
        while same < min(source.cached, len(row.tokens) - 1) and source.tokens[same] == row.tokens[same]:
            same += 1
        shared_pages = same // self.page_size
        row.pages[:shared_pages] = source.pages[:shared_pages]
        row.cached = shared_pages * self.page_size

    def _prefill(self, rows: Sequence[Row], chunk: int | None) -> None:
        pending = list(rows)
        while pending:
            counts = [min(chunk or len(row.tokens), len(row.tokens) - row.cached) for row in pending]
            attention = PrefillAttention(
                self._page_table(pending),
                tuple(counts),
                tuple(row.cached + count for row, count in zip(pending, counts, strict=True)),
            )
            hidden_TN = self._forward(pending, counts, attention)
            ends = self._tensor(counts).cumsum(0) - 1
            done = [i for i, row in enumerate(pending) if row.cached == len(row.tokens)]
            self._extend([pending[i] for i in done], hidden_TN[ends[done]])
            pending = [row for i, row in enumerate(pending) if i not in done]

    def _decode(self, rows: Sequence[Row]) -> None:
        """One token a row; the batch is padded with a row without tokens that writes into the trash page."""
        padded = [*rows, Row([], [0])]
        lengths = self._tensor([len(row.tokens) for row in padded]).int()
        table = self._page_table(padded)
        attention = DecodeAttention(table, lengths, 1, table.shape[1] * self.page_size)
        hidden_TN = self._forward(padded, [1] * len(padded), attention)
        self._extend(rows, hidden_TN[: len(rows)])

    def _forward(
        self, rows: Sequence[Row], counts: Sequence[int], attention: DecodeAttention | PrefillAttention
    ) -> Tensor:
        tokens, positions, kv_slots = [], [], []
        for row, count in zip(rows, counts, strict=True):
            for position in range(row.cached, row.cached + count):
                tokens.append(row.tokens[position] if row.tokens else 0)
                positions.append(position)
                kv_slots.append(row.pages[position // self.page_size] * self.page_size + position % self.page_size)
            row.cached += count
        state = None
        if self._stateful:
            slots_B = self._tensor([row.slot for row in rows])
            decodes = isinstance(attention, DecodeAttention)
            state = StateRows(slots_B, None if decodes else self._tensor(counts).cumsum(0))
        inputs = StepInputs(
            self._tensor(tokens), self._tensor(positions), self._tensor(kv_slots), attention, state=state
        )
        return self.model.forward(inputs, self.caches)

    def _extend(self, rows: Sequence[Row], hidden_RN: Tensor) -> None:
        logits_RV = self.model.gather_logits(self.model.logits(hidden_RN))
        for row, logits_V in zip(rows, logits_RV, strict=True):
            row.logits.append(logits_V.clone())
            row.tokens.append(row.forced.pop(0) if row.forced else int(logits_V.argmax()))

    def _page_table(self, rows: Sequence[Row]) -> Tensor:
        width = max(len(row.pages) for row in rows)
        return self._tensor([row.pages + [0] * (width - len(row.pages)) for row in rows]).int()

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, device=self.device)
