"""What a request is: its prompt, its sampling parameters, and how many answers it stands for.

Knows: token ids, counts, ids and seeds of answers.
Does not know: blocks, slots, steps in flight (chain.py, blocks.py), text, tensors, time.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from hashlib import blake2b
from typing import Annotated, Any, Final, NamedTuple, Self, get_origin, get_type_hints

MAX_STOP_TOKEN_IDS: Final = 16  # of one request, the model's eos ids included: a slot has room for so many
MAX_TOP_LOGPROBS: Final = 20  # most likely tokens reported for one token: the result ring has room for so many
MAX_LOGIT_BIAS: Final = 1024  # biased tokens of one request, as in vLLM: a slot has room for so many
MAX_BAD_WORDS: Final = 256  # of one request, each as one row of token ids: a slot has room for so many
MAX_BAD_WORD_TOKENS: Final = 16  # of one bad word
MAX_SALT_CHARACTERS: Final = 1024
MAX_GRAMMAR_CHARACTERS: Final = 1 << 17
MAX_CHOICES: Final = 128  # answers to one request
_MAX_FACTOR: Final = 1000.0  # of temperature and repetition penalty: beyond it, logits leave the range of float32
_INT64: Final = 2**63
ABOVE_0: Final = math.ulp(0.0)  # the smallest float above 0


class FinishReason(IntEnum):
    """Why a request ended. The device reports NONE, STOP, LENGTH or ERROR; the host adds the others.

    The integers are part of the device's result ring and of the control records: never renumber them.
    """

    NONE = 0
    STOP = 1  # eos, a stop token id, or (host) a stop string
    LENGTH = 2  # max_tokens, or the model's context
    ERROR = 3  # logits were not finite; this request alone ends
    CANCELLED = 4  # a caller asked
    REJECTED = 5  # never admitted: could not fit, or the queue was full

    @property
    def label(self) -> str:
        """The OpenAI wire name: ``stop``, ``length``, or the lower-case name."""
        return self.name.lower()


class Range(NamedTuple):
    """Legal values of a number, both ends included."""

    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are sampled. Field names and meanings are those of the OpenAI and vLLM APIs.

    A number that stands here with its Range is checked, converted and sent by all front ends (``NUMBERS``).

    ``temperature == 0`` is greedy. ``top_k == 0`` and ``top_p == 1.0`` and ``min_p == 0.0`` switch that filter off.
    Filters apply in the order temperature, top-k, top-p, min-p. ``seed`` None is replaced by a drawn, reported seed
    before the request reaches a scheduler. ``logprobs`` n asks for the chosen token and the n most likely ones.
    ``logit_bias``: (token id, what is added to its logit), each id once, ascending. ``allowed_token_ids``: all others
    are never sampled; empty means that all are allowed. ``bad_words_token_ids``: token ids that never follow each other
    in the answer; the front end makes them from bad_words. These three come before penalties, and
    log-probabilities do not show them. ``cache_salt``: the prompt's blocks are shared only with requests that have the
    same; "" is shared by all that have none. ``grammar``: the answer is a text of it, in the notation of
    runtime/grammar.py; "" for any text. Stop ids are sampled only where such a text may end, ``min_tokens`` or not.
    """

    max_tokens: Annotated[int, Range(1, _INT64 - 1)] = 16
    min_tokens: Annotated[int, Range(0, _INT64 - 1)] = 0  # and at most max_tokens
    temperature: Annotated[float, Range(0.0, _MAX_FACTOR)] = 1.0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    top_p: Annotated[float, Range(ABOVE_0, 1.0)] = 1.0
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    repetition_penalty: Annotated[float, Range(1 / _MAX_FACTOR, _MAX_FACTOR)] = 1.0
    presence_penalty: Annotated[float, Range(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, Range(-2.0, 2.0)] = 0.0
    seed: Annotated[int | None, Range(-_INT64, _INT64 - 1)] = None
    n: Annotated[int, Range(1, MAX_CHOICES)] = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Range(0, MAX_TOP_LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, Range(0, MAX_TOP_LOGPROBS)] = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""
    grammar: str = ""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether some tokens may be left out; greedy sampling is the same with and without filters."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """Whether token counts by slot are needed to shape the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits of tokens that the request names, or that its grammar excludes, are changed."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids or self.grammar)


class Field(NamedTuple):
    """A number of SamplingParams; one whose default is None may be None."""

    name: str
    type: type[int] | type[float]
    default: Any
    lowest: float
    highest: float


NUMBERS: Final = tuple(
    Field(one.name, float if hint.__origin__ is float else int, one.default, *hint.__metadata__[0])
    for one, hint in zip(
        fields(SamplingParams), get_type_hints(SamplingParams, include_extras=True).values(), strict=True
    )
    if get_origin(hint) is Annotated
)


def packed(token_ids: Sequence[int]) -> array[int]:
    """Token ids as ``array("i")``, four bytes each; such an array is returned as it is, not copied."""
    return token_ids if isinstance(token_ids, array) else array("i", token_ids)


class TableSpec(NamedTuple):
    """What the token table of a grammar depends on besides the tokenizer (runtime/grammar_tables)."""

    grammar: str
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    allowed_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to complete, ``sampling.n`` times, as every rank receives it.

    ``prompt_token_ids`` is an ``array("i")`` wherever many requests wait (``packed``); it is never written to.
    ``request_id`` is a dense integer from the leader; the caller's own id stays in the front end. ``stop_token_ids``
    holds everything that ends it on the device: the model's eos ids (unless ignored) and the request's own.
    Smaller ``priority`` runs earlier; equal priorities run first come, first served.

    A request with n > 1 has the n ids from ``request_id`` on, one for each answer: so outputs and cancels name them.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0

    @property
    def table_spec(self) -> TableSpec:
        sampling = self.sampling
        return TableSpec(sampling.grammar, self.stop_token_ids, sampling.ignore_eos, sampling.allowed_token_ids)

    @property
    def table_key(self) -> bytes:
        """Hash of ``table_spec``: requests with equal keys share a table."""
        return blake2b(repr(tuple(self.table_spec)).encode(), digest_size=16).digest()

    @property
    def answer_ids(self) -> range:
        """The request ids of its answers."""
        return range(self.request_id, self.request_id + self.sampling.n)

    def answers(self) -> tuple[Self, ...]:
        """The request as n requests for one answer each, over the same prompt.

        Answer i is sampled with seed + i, so that each can be reproduced alone. Only the first has the prompt scored.
        """
        sampling = self.sampling
        if sampling.n == 1:
            return (self,)
        seed = sampling.seed
        each = [replace(sampling, n=1, seed=None if seed is None else _wrapped(seed + i)) for i in range(sampling.n)]
        each[1:] = [replace(other, prompt_logprobs=None) for other in each[1:]]
        of_each = zip(self.answer_ids, each, strict=True)
        return tuple(replace(self, request_id=answer_id, sampling=one) for answer_id, one in of_each)


def _wrapped(seed: int) -> int:
    """``seed`` as a signed 64-bit number."""
    return (seed + 2**63) % 2**64 - 2**63
