"""Every field's legal type and range, and what becomes of legal values that are not plain ones."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engine import ServedModel
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.frontend.validation import (
    MAX_PRIORITY,
    CheckedRequest,
    RequestError,
    checked_prompt,
    checked_request,
    checked_sampling,
    fitted,
    stop_ids_of,
)
from runtime.schedule.request import Request, SamplingParams, packed

MODEL = ServedModel(vocab_size=100, max_model_len=32, eos_token_ids=(0,))
GOOD = Request(5, (1, 2, 3), SamplingParams(seed=1), (0,))


def sampling(**fields: Any) -> SamplingParams:
    return checked_sampling(SamplingParams(**fields), MODEL.vocab_size)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", 0, "max_tokens is 0, but must be at least 1"),
        ("max_tokens", 2**63, "max_tokens is 9223372036854775808, but must be 1 to"),
        ("max_tokens", 10**5000, "max_tokens is a number of 16610 bits"),
        ("max_tokens", True, "max_tokens is True, but must be a whole number"),
        ("max_tokens", 5.0, "max_tokens is 5, but must be a whole number"),
        ("max_tokens", None, "max_tokens is None, but must be a whole number"),
        ("max_tokens", "5", "max_tokens is the text '5', but must be a whole number"),
        ("min_tokens", 17, "min_tokens is 17, but must be 0 to 16"),
        ("n", 129, "n is 129, but must be 1 to 128"),
        ("temperature", float("nan"), "temperature is nan, but must be at least 0 and at most 1000"),
        ("temperature", 10**400, "temperature is a number of 1329 bits, but must be"),
        ("temperature", "hot", "temperature is the text 'hot', but must be a number"),
        ("temperature", False, "temperature is False, but must be a number"),
        ("top_p", 0.0, "top_p is 0, but must be more than 0 and at most 1"),
        ("top_p", Fraction(1, 10**400), "top_p is of type Fraction, but must be more than 0"),
        ("seed", 2**63, "seed is 9223372036854775808, but must be -9223372036854775808 to 9223372036854775807"),
        ("seed", 0.5, "seed is 0.5, but must be a whole number"),
        ("logprobs", 21, "logprobs is 21, but must be 0 to 20"),
        ("prompt_logprobs", [], "prompt_logprobs is of type list, but must be a whole number"),
        ("ignore_eos", 1, "ignore_eos is 1, but must be True or False"),
        ("stop", "END", r"stop is the text 'END', but must be a sequence of texts: give \('END',\)"),
        ("stop", ("a", "\ud800b"), r"a stop string is no Unicode text: character 0 is '\\ud800', half of a surrogate"),
        ("stop", ("",), "a stop string has 0 characters"),
        ("stop", (b"x",), "a stop string is of type bytes, but must be a text"),
        ("stop", ("x",) * 17, "stop has 17 strings"),
        ("stop", {"x"}, "stop is of type set, but must be a sequence of texts"),
        ("stop_token_ids", (100,), "stop_token_ids has 100, but the vocabulary has ids 0 to 99"),
        ("stop_token_ids", (1.0,), "an id of stop_token_ids is 1, but must be a whole number"),
        ("stop_token_ids", 7, "stop_token_ids is 7, but must be a sequence of token ids"),
        ("stop_token_ids", range(10**12), "stop_token_ids has 1000000000000 ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # Python refuses to print one of them
)
def test_a_bad_parameter_is_named_with_its_value_and_what_is_legal(name: str, value: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        sampling(**{name: value})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((), "the prompt is empty"),
        (None, "the prompt is None, but must be a sequence of token ids"),
        (7, "the prompt is 7, but must be"),
        (b"abc", "the prompt is of type bytes"),
        ({1: 2}, "the prompt is of type dict"),
        ((1, 100), "prompt token 1 is 100, but the vocabulary has ids 0 to 99"),
        ((1, -1), "prompt token 1 is -1, but"),
        ((1, 2**70), "prompt token 1 is a number of 71 bits"),
        ((1, 2.0), "prompt token 1 is 2, but must be a whole number"),
        ((1, True), "prompt token 1 is True, but must be a whole number"),
        ((1, None), "prompt token 1 is None"),
        ((1, "2"), "prompt token 1 is the text '2'"),
        ([[1, 2], [3]], "prompt token 0 is of type list"),
        (np.array([[1, 2]]), "prompt token 0 is of type list"),
        (torch.tensor(3), "the prompt is of type Tensor"),
        (range(32), "the prompt has 32 tokens, but prompt and answer together may have 32: shorten it to 31"),
        (range(10**12), "the prompt has 1000000000000 tokens"),
    ],
)
def test_a_bad_prompt_is_named(prompt: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        checked_prompt(prompt, MODEL.vocab_size, MODEL.max_model_len)


@pytest.mark.parametrize("prompt", [[1, 2, 99], range(1, 4), np.array([1, 2, 3], np.int32), torch.tensor([4, 5, 6])])
def test_any_flat_sequence_of_whole_numbers_becomes_a_tuple_of_ints(prompt: Any) -> None:
    found = checked_prompt(prompt, MODEL.vocab_size, MODEL.max_model_len)
    assert found == tuple(int(token) for token in prompt)
    assert {type(token) for token in found} == {int}


def test_legal_values_become_plain_ones() -> None:
    given = sampling(
        max_tokens=np.int64(7),
        top_p=Fraction(1, 2),
        temperature=np.float32(0.5),
        min_p=0,
        stop=["a", "b"],
        stop_token_ids=np.array([4, 5]),
    )
    assert given == SamplingParams(
        max_tokens=7, top_p=0.5, temperature=0.5, stop=("a", "b"), stop_token_ids=(4, 5), min_p=0.0
    )
    plain = (given.max_tokens, given.top_p, given.temperature, given.min_p, *given.stop_token_ids)
    assert [type(value) for value in plain] == [int, float, float, float, int, int]


def test_lengths_are_cut_to_what_fits_behind_the_prompt() -> None:
    """The largest legal ones overflow int32 on a device, and the sums of it with a prompt int64."""
    asked = sampling(max_tokens=2**63 - 1, min_tokens=2**31)
    assert replace(asked, max_tokens=29, min_tokens=29) == fitted(asked, 3, MODEL)
    short = sampling(max_tokens=4, min_tokens=2)
    assert fitted(short, 3, MODEL) is short


def test_a_request_is_checked_once_for_each_model() -> None:
    checked = checked_request(replace(GOOD, sampling=SamplingParams(seed=1, stop=("x",), max_tokens=2**31)), MODEL)
    assert checked == CheckedRequest(5, packed((1, 2, 3)), SamplingParams(seed=1, max_tokens=29), (0,))
    assert checked_request(checked, MODEL) is checked
    smaller = ServedModel(vocab_size=3, max_model_len=32, eos_token_ids=())
    with pytest.raises(RequestError, match="prompt token 2 is 3"):
        checked_request(checked, smaller)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"request_id": -1}, "request_id is -1"),
        ({"request_id": 2**62 - 127}, "request_id is 4611686018427387777"),
        ({"request_id": 2**62}, "request_id is 4611686018427387904, but must be 0 to 4611686018427387776"),
        ({"request_id": "5"}, "request_id is the text '5'"),
        ({"prompt_token_ids": None}, "the prompt is None"),
        ({"sampling": None}, "the sampling parameters are None, but must be SamplingParams"),
        ({"sampling": SamplingParams()}, "request 5 has no seed"),
        ({"sampling": SamplingParams(seed=1, n=129)}, "n is 129, but must be 1 to 128"),
        ({"stop_token_ids": range(17)}, "stop_token_ids of the request has 17 ids, but at most 16"),
        ({"stop_token_ids": (100,)}, "stop_token_ids of the request has 100"),
        ({"priority": MAX_PRIORITY + 1}, "priority is 2147483648, but must lie within 2147483647 of 0"),
        ({"priority": 0.5}, "priority is 0.5, but must be a whole number"),
    ],
)
def test_a_bad_request_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        checked_request(replace(GOOD, **fields), MODEL)
    with pytest.raises(RequestError, match="the request is of type dict, but must be a Request"):
        checked_request(fields, MODEL)  # type: ignore[arg-type]


def test_the_model_s_eos_ids_count_among_the_stop_ids() -> None:
    params = SamplingParams(stop_token_ids=(0, *range(5, 20)))
    assert stop_ids_of(params, (0,)) == (0, *range(5, 20))
    with pytest.raises(RequestError, match="17 stop token ids, the model's 2 eos ids included, but at most 16"):
        stop_ids_of(params, (0, 1))
    assert len(stop_ids_of(replace(params, ignore_eos=True), (0, 1))) == 16


def test_what_there_is_no_memory_for_is_refused_and_says_what_to_type() -> None:
    """Its graphs would be captured in the middle of other requests, and take the job with them."""
    small = replace(MODEL, widest=SamplingVariant(random=True, filters=True, unbounded=True))
    plain = Request(1, (5, 6), SamplingParams(temperature=0.7, top_p=0.9, seed=1))
    assert checked_request(plain, small).sampling.top_p == 0.9
    wide = replace(plain, sampling=replace(plain.sampling, presence_penalty=1.0, logprobs=20))
    assert checked_request(wide, MODEL).sampling.logprobs == 20
    with pytest.raises(RequestError, match=r"needs random, filters, penalties, logprobs, .* --memory-fraction"):
        checked_request(wide, small)
