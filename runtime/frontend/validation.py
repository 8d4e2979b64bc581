"""What a request must look like before an engine sees it: a request that passes here cannot harm another one.

Knows: the legal type and range of every field, and what a prompt must satisfy for a given model.
Does not know: where a request comes from (launch), or whether there is room for it now (the scheduler).

Every door goes through here: a line of `generate`, `complete`, EngineClient and Engine.add. Whatever data a caller puts
into a field raises RequestError or is legal, and what comes out is made of plain ints, floats and texts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, Final

from runtime.frontend.engine_protocol import ModelFacts
from runtime.schedule.request import (
    ABOVE_0,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    NUMBERS,
    Request,
    SamplingParams,
    packed,
)

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
MAX_BIAS: Final = 100.0  # of logit_bias, as in OpenAI's API
MAX_QUANTUM: Final = 2**31 - 1
MAX_PRIORITY: Final = 2**31 - 1
_REQUEST_IDS: Final = 2**62  # what control records carry (runtime/replicate/event_codec.py)

_numbers_of = attrgetter(*(field.name for field in NUMBERS))


class RequestError(ValueError):
    """A request cannot be served as it stands; the text names the field, its value and what is legal.

    ``field``: of SamplingParams, or ``bad_words`` or ``priority``, where one is to blame.
    """

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True, slots=True)
class CheckedRequest(Request):
    """A request whose fields were checked for ``model`` and fit it: an engine of that model takes it as it is.

    Made by ``checked_request``, and by EngineClient of what ``checked_prompt`` and ``checked_sampling`` returned.
    """

    model: ModelFacts | None = field(default=None, compare=False, repr=False)


def checked_request(request: Request, model: ModelFacts) -> CheckedRequest:
    """A request as every rank may see it: checked, without its stop strings, max_tokens cut to what fits.

    Stop strings are looked for by EngineClient on the leader; ranks have no use for them. Raises RequestError.
    """
    if not isinstance(request, Request):
        raise RequestError(f"the request is {_shown(request)}, but must be a Request")
    if isinstance(request, CheckedRequest) and request.model is model:
        return request
    request_id = _whole("request_id", request.request_id, 0, _REQUEST_IDS - MAX_CHOICES)
    prompt = checked_prompt(request.prompt_token_ids, model.vocab_size, model.max_model_len)
    sampling = checked_sampling(request.sampling, model.vocab_size)
    if sampling.seed is None:
        raise RequestError(f"request {request_id} has no seed: draw one, so that the answer can be repeated")
    stops = _stop_token_ids(request.stop_token_ids, model.vocab_size, "stop_token_ids of the request")
    sampling = replace(fitted(sampling, len(prompt), model), stop=())
    return CheckedRequest(request_id, packed(prompt), sampling, stops, checked_priority(request.priority), model)


def checked_session(request: Request, quantum: int, model: ModelFacts) -> CheckedRequest:
    """``checked_request`` of one that begins a session. Raises RequestError."""
    _whole("quantum", quantum, 1, MAX_QUANTUM)
    checked = checked_request(request, model)
    if checked.sampling.n != 1:
        raise RequestError(f"n is {checked.sampling.n}, but a session has one answer: fork the session")
    if checked.sampling.grammar:
        raise RequestError("a session has no grammar: send a request instead", "grammar")
    return checked


def check_request_ids(*request_ids: int) -> None:
    """Raises RequestError unless each is a whole number that could be a request's id; whether one is, is not asked."""
    for request_id in request_ids:
        _whole("request_id", request_id, 0, _REQUEST_IDS - 1)


def check_quantum(epoch: int, tokens: int) -> None:
    """Of a session that continues. Raises RequestError."""
    _whole("epoch", epoch, 0, MAX_QUANTUM)
    _whole("tokens", tokens, 1, MAX_QUANTUM)


def checked_turn(token_ids: object, max_tokens: int, quantum: int, model: ModelFacts) -> array[int]:
    """What is said to a session. Raises RequestError."""
    _whole("quantum", quantum, 1, MAX_QUANTUM)
    _whole("max_tokens", max_tokens, 1, MAX_QUANTUM)
    return packed(checked_prompt(token_ids, model.vocab_size, model.max_model_len))


def checked_prompt(prompt_token_ids: object, vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """The ids as a tuple of ints. Raises RequestError unless it is a flat sequence of at least one whole number, every
    id exists, and one token of answer fits after it.
    """
    given = _sequence("the prompt", prompt_token_ids, "token ids")
    if not given:
        raise RequestError("the prompt is empty: give at least one token")
    if len(given) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(given)} tokens, but prompt and answer together may have {max_model_len}: shorten it "
            f"to {max_model_len - 1} or fewer, or raise --max-model-len if the model allows it"
        )
    ids = tuple(given)
    if set(map(type, ids)) != {int}:
        ids = tuple(_integer(f"prompt token {at}", token) for at, token in enumerate(ids))
    check_ids_exist(ids, vocab_size, "prompt token {}")
    return ids


def check_ids_exist(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raises RequestError for the first that is no token; ``name`` with its place in it is how the error calls it."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        at, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise RequestError(f"{name.format(at)} is {_shown(token)}, but the vocabulary has ids 0 to {vocab_size - 1}")


def checked_sampling(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """The same with plain values: RequestError for the first field of a wrong type or out of range.

    ``max_tokens`` may still be more than fits: ``fitted`` cuts it.
    """
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"the sampling parameters are {_shown(sampling)}, but must be SamplingParams")
    name, plain = "", dict[str, Any]()
    try:
        for (name, kind, default, lowest, highest), value in zip(NUMBERS, _numbers_of(sampling), strict=True):
            checked = _whole if kind is int else _number
            optional = value is None and default is None
            plain[name] = None if optional else checked(name, value, lowest, highest)
        name = "min_tokens"
        _whole(name, plain[name], 0, plain["max_tokens"])
        name = "cache_salt"
        if len(checked_text(name, sampling.cache_salt)) > MAX_SALT_CHARACTERS:
            raise RequestError(f"cache_salt has more than {MAX_SALT_CHARACTERS} characters: send a digest of it")
        name = "grammar"
        if len(checked_text(name, sampling.grammar)) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(f"the grammar has more than {MAX_GRAMMAR_CHARACTERS} characters: send a shorter one")
        name = "ignore_eos"
        if not isinstance(sampling.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {_shown(sampling.ignore_eos)}, but must be True or False")
        for name, checked_list in _LISTS.items():
            value = getattr(sampling, name)
            if type(value) is not tuple or value:  # mostly they are empty
                plain[name] = checked_list(value, vocab_size)
    except RequestError as error:
        error.field = name
        raise
    return replace(sampling, **plain)


def fitted(sampling: SamplingParams, prompt_tokens: int, model: ModelFacts) -> SamplingParams:
    """``sampling`` with max_tokens and min_tokens cut to what fits after a prompt of so many tokens.

    Raises RequestError for a kind of sampling that this engine has no memory for.
    """
    if (reason := model.lacks_memory_for(sampling)) is not None:
        raise RequestError(reason)
    room = model.max_model_len - prompt_tokens
    if sampling.max_tokens <= room:
        return sampling
    return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))


def checked_priority(priority: object) -> int:
    """Raises RequestError unless it is a whole number within MAX_PRIORITY of 0."""
    number = _integer("priority", priority)
    if not -MAX_PRIORITY <= number <= MAX_PRIORITY:
        raise RequestError(f"priority is {_shown(number)}, but must lie within {MAX_PRIORITY} of 0", "priority")
    return number


def checked_text(name: str, text: object) -> str:
    """Raises RequestError unless ``text`` is one that can be written as UTF-8."""
    if not isinstance(text, str):
        raise RequestError(f"{name} is {_shown(text)}, but must be a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is no Unicode text: character {error.start} is {text[error.start]!r}, half of a surrogate pair"
        ) from None
    return text


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def stop_ids_of(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Everything that ends a request on the device, each once: with a grammar eos ids, too, even if they are ignored,
    since they end a text that nothing can follow. Raises RequestError when a slot cannot hold them."""
    ignored = sampling.ignore_eos and not sampling.grammar
    ids = tuple(dict.fromkeys((*(() if ignored else eos_token_ids), *sampling.stop_token_ids)))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"{len(ids)} stop token ids, the model's {len(eos_token_ids)} eos ids included, but at most "
            f"{MAX_STOP_TOKEN_IDS} are allowed",
            "stop_token_ids",
        )
    return ids


def _stop_strings(stop: object, _vocab_size: int) -> tuple[str, ...]:
    if isinstance(stop, str):  # a sequence of texts, too, but of single letters
        raise RequestError(f"stop is the text {stop[:40]!r}, but must be a sequence of texts: give ({stop[:40]!r},)")
    strings = _sequence("stop", stop, "texts")  # sizes are looked at before anything is copied
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings, but at most {MAX_STOP_STRINGS} are allowed")
    for string in strings:
        text = checked_text("a stop string", string)
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise RequestError(f"a stop string has {len(text)} characters, but must have 1 to {MAX_STOP_CHARACTERS}")
    return tuple(strings)


def _stop_token_ids(stop_token_ids: object, vocab_size: int, name: str = "stop_token_ids") -> tuple[int, ...]:
    ids = _sequence(name, stop_token_ids, "token ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"{name} has {len(ids)} ids, but at most {MAX_STOP_TOKEN_IDS} are allowed")
    for token in ids:
        if not 0 <= _integer(f"an id of {name}", token) < vocab_size:
            raise RequestError(f"{name} has {_shown(token)}, but the vocabulary has ids 0 to {vocab_size - 1}")
    return tuple(map(int, ids))


def _logit_bias(logit_bias: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """As in SamplingParams: ids once, ascending."""
    given = tuple(logit_bias.items()) if isinstance(logit_bias, Mapping) else logit_bias
    pairs = _sequence("logit_bias", given, "pairs of a token id and a number")
    if len(pairs) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(pairs)} tokens, but at most {MAX_LOGIT_BIAS} are allowed")
    biases: dict[int, float] = {}
    for pair in pairs:
        if len(pair := _sequence("an entry of logit_bias", pair, "a token id and a number")) != 2:
            raise RequestError(f"an entry of logit_bias has {len(pair)} parts, but must be a token id and a number")
        token = _token("logit_bias", pair[0], vocab_size)
        if token in biases:
            raise RequestError(f"logit_bias names token {token} twice")
        biases[token] = _number(f"logit_bias of token {token}", pair[1], -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(biases.items()))


def _allowed_token_ids(allowed: object, vocab_size: int) -> tuple[int, ...]:
    """As in SamplingParams: ids once, ascending."""
    ids = _sequence("allowed_token_ids", allowed, "token ids")
    if len(ids) > vocab_size:
        raise RequestError(f"allowed_token_ids has {len(ids)} ids, but the vocabulary has {vocab_size}")
    return tuple(sorted({_token("allowed_token_ids", token, vocab_size) for token in ids}))


def _bad_words(bad_words: object, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    words = _sequence("bad_words_token_ids", bad_words, "lists of token ids")
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words_token_ids has {len(words)} words, but at most {MAX_BAD_WORDS} are allowed")
    return tuple(_bad_word(word, vocab_size) for word in words)


def _bad_word(word: object, vocab_size: int) -> tuple[int, ...]:
    ids = _sequence("a word of bad_words_token_ids", word, "token ids")
    if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"a word of bad_words_token_ids has {len(ids)} tokens, but may have 1 to {MAX_BAD_WORD_TOKENS}"
        )
    return tuple(_token("bad_words_token_ids", token, vocab_size) for token in ids)


_LISTS: Final[Mapping[str, Callable[[object, int], tuple[Any, ...]]]] = {
    "stop": _stop_strings,
    "stop_token_ids": _stop_token_ids,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "bad_words_token_ids": _bad_words,
}


def _token(name: str, value: object, vocab_size: int) -> int:
    token = _integer(f"an id of {name}", value)
    if not 0 <= token < vocab_size:
        raise RequestError(f"{name} has {_shown(token)}, but the vocabulary has ids 0 to {vocab_size - 1}")
    return token


def _sequence(name: str, value: object, of: str) -> Sequence[Any]:
    """A list, a tuple or an array. Texts and bytes are sequences, too, but never meant as such."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return value
    listed = getattr(value, "tolist", None)  # arrays and tensors
    if callable(listed) and not isinstance(value, type | memoryview) and isinstance(found := listed(), list):
        return found
    raise RequestError(f"{name} is {_shown(value)}, but must be a sequence of {of}")


def _integer(name: str, value: object) -> int:
    """``value`` as a plain int; True and 1.0 are none."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} is {_shown(value)}, but must be a whole number")
    return int(value)


def _whole(name: str, value: object, low: float, high: float) -> int:
    number = _integer(name, value)
    if not low <= number <= high:
        legal = f"at least {low}" if number < low and high >= 2**31 - 1 else f"{low} to {high}"
        raise RequestError(f"{name} is {_shown(number)}, but must be {legal}")
    return number


def _number(name: str, value: object, low: float, high: float) -> float:
    """``value`` must be a number, finite, at least ``low`` and at most ``high``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} is {_shown(value)}, but must be a number")
    given: Any = value
    # Compared before it becomes a float: a whole number may be beyond all of them. NaN compares as false.
    if low <= given <= high and math.isfinite(given):
        return float(given)
    legal = "more than 0" if low == ABOVE_0 else f"at least {low:g}"
    raise RequestError(f"{name} is {_shown(value)}, but must be {legal} and at most {high:g}")


def _shown(value: object) -> str:
    """A value for a message: short, and whatever it is, it does not raise."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):  # Python refuses to print a number of thousands of digits
        return f"{value:d}" if -(10**20) < value < 10**20 else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return f"of type {type(value).__name__}"
