"""Rows of a mixed step that share pages: a key that one of them writes is seen by the others in the same step.

Knows: the promise of MixedAttention (models/inputs.py), and kernels that break it. Does not know: who lets rows share
pages (runtime/schedule), what GPUs launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from models.inputs import PIECE, DecodeAttention, MixedAttention, PrefillAttention, StepInputs
from models.kernels.interface import Rotation
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from models.registry import config_from_dict
from parallel.comm.collectives import SingleRank
from tests.models.tiny_checkpoint import TINY
from tests.plant import Kernels, Op, invariant_kernels, kernels_with, reference_kernels

PAGE, PAGES = 4, 20
CONFIG = config_from_dict(TINY)


class Row(NamedTuple):
    """``new`` tokens, from place ``begin`` of those that ``pages`` hold."""

    begin: int
    new: int
    pages: tuple[int, ...]

    @property
    def places(self) -> range:
        return range(self.begin, self.begin + self.new)

    @property
    def slots(self) -> list[int]:
        return [self.pages[at // PAGE] * PAGE + at % PAGE for at in self.places]


DECODING = 2  # the first rows of a step
# Row 3 writes page 2, which rows 0 (it decodes), 2 (before it) and 5 (behind it) read; row 1, which decodes, writes the
# last token of page 6, which row 4 reads.
SHARED = (
    Row(10, 1, (1, 2, 3)),
    Row(7, 1, (5, 6, 0)),
    Row(8, 4, (1, 2, 8)),
    Row(4, 5, (1, 2, 4)),
    Row(8, 3, (5, 6, 7)),
    Row(9, 2, (1, 2, 9)),
)
WRITERS_FIRST = (3, 1, 0, 2, 4, 5)
# The same, but whoever read what another row wrote has a page of its own there.
APART = tuple(
    row if number in (1, 3) else row._replace(pages=(row.pages[0], 10 + number, row.pages[2]))
    for number, row in enumerate(SHARED)
)


def tokens_of(rows: Sequence[Row]) -> list[list[int]]:
    """Of each row, in a step of these."""
    ends = list(accumulate(row.new for row in rows))
    return [list(range(end - row.new, end)) for end, row in zip(ends, rows, strict=True)]


def layer(kernels: Kernels) -> Attention:
    context = ModelContext(SingleRank(), kernels, torch.float32)
    angles_LR = cos_sin_cache(CONFIG.rope, CONFIG.rotary_dim, CONFIG.max_length)
    norm, q_norm, k_norm = (RMSNorm(size, 1e-6, context) for size in (CONFIG.hidden_size, *[CONFIG.head_dim] * 2))
    made = Attention(CONFIG, context, angles_LR, norm, q_norm=q_norm, k_norm=k_norm, qkv_bias=True)
    draw = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.normal_(0.0, 0.5, generator=draw)
    return made


def cache() -> Tensor:
    """Something in every page, also where the step writes."""
    shape = (2, PAGES, PAGE, CONFIG.kv_heads, CONFIG.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def tokens() -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(sum(row.new for row in SHARED), CONFIG.hidden_size, generator=draw)


def attended(
    made: Attention, x_TN: Tensor, rows: Sequence[Row], kv_layer: Tensor, attention: PrefillAttention | MixedAttention
) -> Tensor:
    places_T = torch.tensor([at for row in rows for at in row.places])
    slots_T = torch.tensor([slot for row in rows for slot in row.slots])
    inputs = StepInputs(torch.zeros_like(places_T), places_T, slots_T, attention)
    out_TN, _ = made(x_TN.clone(), None, inputs, kv_layer)
    assert isinstance(out_TN, Tensor)
    return out_TN


def one_after_the_other(rows: Sequence[Row]) -> Tensor:
    """Each row in a step of its own, whoever writes a page before those who read it."""
    made, kv_layer, x_TN, found_TN = layer(reference_kernels()), cache(), tokens(), torch.empty_like(tokens())
    of_rows = tokens_of(rows)
    for number in WRITERS_FIRST:
        row, here = rows[number], of_rows[number]
        attention = PrefillAttention(table([row]), (row.new,), (row.places.stop,))
        found_TN[here] = attended(made, x_TN[here], [row], kv_layer, attention)
    return found_TN


def table(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([row.pages for row in rows], dtype=torch.int32)


def as_chunks(rows: Sequence[Row]) -> MixedAttention:
    known = [row.places.stop for row in rows]
    others = [0] * DECODING
    lengths_B = torch.tensor([*known[:DECODING], *[0] * (len(rows) - DECODING)], dtype=torch.int32)
    decode = DecodeAttention(table(rows), lengths_B, 1, 3 * PAGE, skip_empty=True)
    query_lengths = (*others, *(row.new for row in rows[DECODING:]))
    return MixedAttention(
        decode, PrefillAttention(table(rows), query_lengths, (*others, *known[DECODING:]), first_token=DECODING)
    )


def as_pieces(rows: Sequence[Row]) -> MixedAttention:
    """As a step that splits its keys has them."""
    chunks = rows[DECODING:]
    columns = [here[0] for here in tokens_of(rows)[DECODING:]], [row.new for row in chunks]
    starts_B, new_B = (torch.tensor(column, dtype=torch.int32) for column in columns)
    known_B = torch.tensor([row.places.stop for row in chunks], dtype=torch.int32)
    split = DecodeAttention(table(chunks), known_B, PIECE, 3 * PAGE, starts_B=starts_B, queries_B=new_B)
    return MixedAttention(as_chunks(rows).decode, split)


LAYOUTS = [as_chunks, as_pieces]
Layout = Callable[[Sequence[Row]], MixedAttention]


def check(kernels: Kernels, rows: Sequence[Row], layout: Layout) -> None:
    """Far from the last bits: a key that is not there changes the result by a tenth and more."""
    found_TN = attended(layer(kernels), tokens(), rows, cache(), layout(rows))
    torch.testing.assert_close(found_TN, one_after_the_other(rows), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernels", [reference_kernels(), invariant_kernels()], ids=lambda k: k.name)
@pytest.mark.parametrize("rows", [SHARED, APART], ids=["shared", "apart"])
def test_what_a_row_writes_is_seen_by_all(rows: Sequence[Row], kernels: Kernels, layout: Layout) -> None:
    check(kernels, rows, layout)


# ---- mutants ----

Turns = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # of rows: whose keys are written, who attends then
EVERY, DECODES, CHUNKS = (0, 1, 2, 3, 4, 5), (0, 1), (2, 3, 4, 5)
TURNS: dict[str, Turns] = {
    "right": ((EVERY, EVERY),),
    "attends first": (((), EVERY), (EVERY, ())),
    "decode rows first": ((DECODES, DECODES), (CHUNKS, CHUNKS)),
    "chunks first": ((CHUNKS, CHUNKS), (DECODES, DECODES)),
    "row by row": tuple(((row,), (row,)) for row in EVERY),
    "the last row first": tuple(((row,), (row,)) for row in reversed(EVERY)),
}


class InTurns:
    """Rows write and attend in ``turns``, as launches would that do both for some of them."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._slots_T = self._written = torch.empty(0)

    def rope_and_cache(self, rope: Op, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation) -> Tensor:
        self._slots_T, self._written = rotation.kv_slots_T, kv_layer.clone()
        q_THD: Tensor = rope(qkv_TX, heads, self._written, rotation)
        return q_THD

    def mixed_attention(self, attend: Op, q_THD: Tensor, kv_layer: Tensor, *given: Any) -> Tensor:
        out_THD, of_rows = torch.empty_like(q_THD), tokens_of(SHARED)
        for writing, attending in self.turns:
            slots = self._slots_T[[token for row in writing for token in of_rows[row]]].long()
            kv_layer.flatten(1, 2)[:, slots] = self._written.flatten(1, 2)[:, slots]
            here = [token for row in attending for token in of_rows[row]]
            out_THD[here] = attend(q_THD, kv_layer, *given)[here]
        return out_THD


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("turns", TURNS)
def test_keys_that_are_written_too_late_are_missed(turns: str, layout: Layout) -> None:
    """Rows that share nothing would not tell, but of keys that their own row writes too late."""
    mutant = InTurns(TURNS[turns])
    kernels = kernels_with(rope_and_cache=mutant.rope_and_cache, mixed_attention=mutant.mixed_attention)
    for rows, wrong in ((SHARED, turns != "right"), (APART, turns == "attends first")):
        if wrong:
            with pytest.raises(AssertionError, match="not close"):
                check(kernels, rows, layout)
        else:
            check(kernels, rows, layout)
