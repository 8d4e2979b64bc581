"""The side channel of prompt log-probabilities: bounded pieces, lazy memory, rows cut apart again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.packing import pack
from runtime.execute.sampling.logprobs import (
    PIECE,
    PromptLogprobRing,
    PromptLogprobs,
    score_words,
    token_logprobs,
)
from runtime.execute.slot_state import SlotTables
from runtime.schedule.plan import Chunk, Scored
from tests.runtime.execute.plans import decode_step, prefill_step

VOCABULARY, WIDTH, ROOM = 37, 5, 3 * PIECE


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    with TwinDevice() as opened:
        yield opened


def long_step(length: int = 2 * PIECE + 9) -> LaunchSpec:
    """A chunk that goes on elsewhere, one that is not scored, and one whose first tokens were scored before."""
    tokens = tuple(i % VOCABULARY for i in range(length + 1))
    return prefill_step(
        1,
        (
            Chunk(1, 0, tokens[:-1], last=False, scored=Scored(1, tokens[1:], 2)),
            Chunk(2, 0, (1, 2, 3), last=True),
            Chunk(3, 4, (4, 5, 6, 7), last=True, scored=Scored(7, (7,), 3)),
        ),
    )


def hidden_of(step: LaunchSpec) -> Tensor:
    return torch.randn(step.plan.prefill_tokens, WIDTH, generator=torch.Generator().manual_seed(0))


def scored_2S(device: TwinDevice, step: LaunchSpec) -> Tensor:
    packed = pack(step, SlotTables(device, max_requests=4, max_blocks=4, vocab_size=VOCABULARY), None, max_rows=8)
    return torch.from_numpy(packed["scored_2S"])


def test_a_long_prompt_is_scored_piece_by_piece_and_rows_come_apart_again(device: TwinDevice) -> None:
    step, head = long_step(), torch.randn(WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(1))
    hidden_TN, sizes = hidden_of(step), []

    def logits_of(hidden_RN: Tensor) -> Tensor:
        sizes.append(len(hidden_RN))
        return hidden_RN @ head

    scores = PromptLogprobRing(device, entries=2, max_tokens=ROOM).claim(step.plan, 1)
    assert scores is not None
    scores.fill(hidden_TN, scored_2S(device, step), logits_of)
    scores.send()
    first, silent, third = scores.read()
    assert sizes == [PIECE, PIECE, 10]
    assert silent is None
    length = len(step.plan.chunks[0].token_ids)
    for row, found in ((0, first), (2, third)):
        wanted = step.plan.chunks[row].scored
        assert isinstance(found, PromptLogprobs)
        assert wanted is not None
        before = slice(0, length) if row == 0 else slice(length + 3 + 2, length + 3 + 3)
        expected = token_logprobs(hidden_TN[before] @ head, torch.tensor(wanted.token_ids), wanted.top)
        assert found.start == wanted.start
        assert torch.allclose(torch.from_numpy(found.chosen_S), expected.chosen, atol=1e-5)
        assert found.rank_S.tolist() == expected.rank.tolist()
        assert found.top_ids_SN.tolist() == expected.top_ids.tolist()
        assert torch.allclose(torch.from_numpy(found.top_SN), expected.top_values, atol=1e-5)


def test_memory_is_taken_at_the_first_claim_and_never_again(device: TwinDevice) -> None:
    channel = PromptLogprobRing(device, entries=3, max_tokens=ROOM)
    before = device.allocations()
    silent = prefill_step(1, (Chunk(1, 0, (1, 2), last=True),))
    assert channel.claim(silent.plan, 0) is None
    assert channel.claim(decode_step(1, (1, 2)).plan, 0) is None
    assert (channel.nbytes, device.allocations()) == (0, before)
    claims = [channel.claim(long_step().plan, index % 3) for index in range(6)]
    assert device.allocations() == before + 1
    assert channel.nbytes == 4 * 3 * score_words(ROOM, 20)
    assert [claim.words for claim in claims if claim is not None] == [score_words(2 * PIECE + 10, 3)] * 6


def test_a_full_step_fits_with_everything_asked_for(device: TwinDevice) -> None:
    tokens = (1,) * ROOM
    step = prefill_step(1, (Chunk(1, 0, tokens, last=False, scored=Scored(1, tokens, 20)),))
    scores = PromptLogprobRing(device, entries=1, max_tokens=ROOM).claim(step.plan, 0)
    assert scores is not None
    assert scores.words == score_words(ROOM, 20)


def test_what_was_read_survives_the_entry(device: TwinDevice) -> None:
    """The pinned memory belongs to a later step as soon as this one is taken."""
    step = long_step(3)
    channel = PromptLogprobRing(device, entries=1, max_tokens=ROOM)
    scores = channel.claim(step.plan, 0)
    assert scores is not None
    scores.device_X.fill_(7)
    scores.send()
    first = scores.read()[0]
    scores.host_X.fill_(8)
    assert first is not None
    assert first.rank_S.tolist() == [7, 7, 7]
