"""What a request must look like before an engine sees it: a request that passes here cannot harm another one.

Knows: the legal range of every sampling parameter, and what a prompt must satisfy for a given model.
Does not know: where a request comes from (launch), or whether there is room for it now (the scheduler).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from runtime.schedule.request import SamplingParams

MAX_CHOICES: Final = 128
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 16  # the model's eos ids included: what a slot holds (runtime/execute/slot_state.py)
MAX_LOGPROBS: Final = 20
MAX_FACTOR: Final = 1000.0  # of temperature and repetition penalty: beyond it, logits leave the range of float32
_INT64: Final = 2**63


class RequestError(ValueError):
    """A request cannot be served as it stands; the text names the field, its value and what is legal."""


def check_prompt(prompt_token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raises RequestError unless every id exists and at least one token of answer fits behind the prompt."""
    length = len(prompt_token_ids)
    if length == 0:
        raise RequestError("the prompt is empty: give at least one token")
    if length >= max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens, but prompt and answer together may have {max_model_len}: shorten it "
            f"to {max_model_len - 1} or fewer, or raise --max-model-len if the model allows it"
        )
    if not (min(prompt_token_ids) >= 0 and max(prompt_token_ids) < vocab_size):
        at, token = next((i, t) for i, t in enumerate(prompt_token_ids) if not 0 <= t < vocab_size)
        raise RequestError(f"prompt token {at} is {token}, but the vocabulary has ids 0 to {vocab_size - 1}")


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for the first parameter that is out of range."""
    _whole("n", sampling.n, 1, MAX_CHOICES)
    _whole("max_tokens", sampling.max_tokens, 1, _INT64 - 1)
    _whole("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    _whole("top_k", sampling.top_k, 0, 2**31 - 1)
    _number("temperature", sampling.temperature, 0.0, MAX_FACTOR)
    _number("top_p", sampling.top_p, 0.0, 1.0, above=True)
    _number("min_p", sampling.min_p, 0.0, 1.0)
    _number("repetition_penalty", sampling.repetition_penalty, 1 / MAX_FACTOR, MAX_FACTOR)
    _number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if sampling.seed is not None:
        _whole("seed", sampling.seed, -_INT64, _INT64 - 1)
    if sampling.logprobs is not None:
        _whole("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    if sampling.prompt_logprobs is not None:
        _whole("prompt_logprobs", sampling.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_stops(sampling.stop, sampling.stop_token_ids, vocab_size)


def _check_stops(stop: Sequence[str], stop_token_ids: Sequence[int], vocab_size: int) -> None:
    if isinstance(stop, str):  # a sequence of texts, too, but of single letters
        raise RequestError(f"stop is the text {stop[:40]!r}, but must be a sequence of texts: give ({stop[:40]!r},)")
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stop)} strings, but at most {MAX_STOP_STRINGS} are allowed")
    for string in stop:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise RequestError(f"a stop string has {len(string)} characters, but must have 1 to {MAX_STOP_CHARACTERS}")
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(stop_token_ids)} ids, but at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    for token in stop_token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"stop_token_ids has {token}, but the vocabulary has ids 0 to {vocab_size - 1}")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        legal = f"at least {low}" if high >= 2**31 - 1 else f"{low} to {high}"
        raise RequestError(f"{name} is {_short(value)}, but must be {legal}")


def _number(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """``value`` must be finite, at least ``low`` (more than it if ``above``) and at most ``high``."""
    if math.isfinite(value) and (low < value if above else low <= value) and value <= high:
        return
    legal = f"more than {low:g}" if above else f"at least {low:g}"
    raise RequestError(f"{name} is {value:g}, but must be {legal} and at most {high:g}")


def _short(value: int) -> str:
    """A number of a thousand digits is no use in a message (and Python refuses to print it)."""
    return str(value) if -(10**20) < value < 10**20 else f"a number of {value.bit_length()} bits"
