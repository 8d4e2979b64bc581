"""What a sequence owns from the moment that it holds a slot."""

from __future__ import annotations

from runtime.schedule.request import Request, SamplingParams, packed
from runtime.schedule.sequence import SequenceState


def test_tokens_of_a_seated_sequence_are_its_own() -> None:
    """Before, a waiting prompt is held once, with its request."""
    request = Request(3, packed(range(40)), SamplingParams(max_tokens=9))
    sequence = SequenceState(request, max_length=49, arrival=0)
    assert sequence.tokens is request.prompt_token_ids
    sequence.seated(slot=1, epoch=1)
    assert sequence.tokens == request.prompt_token_ids
    sequence.tokens.append(7)
    assert list(request.prompt_token_ids) == list(range(40))
