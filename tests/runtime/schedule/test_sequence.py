"""What a sequence owns from the moment that it holds a slot."""

from __future__ import annotations

import sys

import pytest

from runtime.schedule.request import Request, SamplingParams, packed
from runtime.schedule.sequence import SequenceState


@pytest.mark.parametrize("prompt", [1, 15, 512])
@pytest.mark.parametrize("answer", [1, 15, 16, 17, 400, 3000])
def test_tokens_of_a_seated_sequence_are_its_own_and_do_not_move(prompt: int, answer: int) -> None:
    request = Request(3, packed(range(prompt)), SamplingParams(max_tokens=answer))
    sequence = SequenceState(request, max_length=prompt + answer, arrival=0)
    assert sequence.tokens is request.prompt_token_ids
    sequence.seated(slot=1, epoch=1)
    assert sequence.tokens == request.prompt_token_ids
    held = sys.getsizeof(sequence.tokens)
    for token in range(min(answer, 1024)):
        sequence.tokens.append(token)
    assert sys.getsizeof(sequence.tokens) == held
    assert len(request.prompt_token_ids) == prompt
