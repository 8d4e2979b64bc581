"""The fields of SamplingParams by name, for functions that take some of them as keywords and pass them on.

Knows: names and types, which the type checker holds against SamplingParams wherever they are passed on.
Does not know: defaults; what is left out stays what the function makes it.
"""

from __future__ import annotations

from typing import TypedDict


class SamplingFields(TypedDict, total=False):
    """As in runtime/schedule/request.py."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    n: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    grammar: str
