"""Log-probabilities token by token: the bytes of all tokens are the text's, and offsets point into the text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.api.response_logprobs import TokenPlaces, of_chat, of_completion
from runtime.frontend.outputs import TokenLogprob
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.frontend import small_tokenizers

KINDS = [small_tokenizers.byte_level, small_tokenizers.sentencepiece]
some = settings(derandomize=True, max_examples=20, deadline=None, database=None)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@some
def test_bytes_are_the_text_s_and_offsets_point_into_it(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    """For an answer in pieces as in a stream, after any prompt."""
    tokenizer = kind()
    texts = st.text(alphabet=st.sampled_from("abthe .\n世é🌍"), max_size=12)
    special = st.sampled_from(sorted(tokenizer.silent_ids))
    prompt = tokenizer.encode(data.draw(texts))
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=False)
    ids.insert(data.draw(st.integers(0, len(ids))), data.draw(special))
    text = tokenizer.decode(ids, prompt)
    places = TokenPlaces(tokenizer, prompt)
    rows = [of_completion([(token, TokenLogprob(token, -1.0, 1))], places) for token in ids]
    for row in rows:
        ((shown, offset),) = zip(row["tokens"], row["text_offset"], strict=True)
        assert offset <= len(text)
        assert "\ufffd" in shown or shown.startswith("<token ") or text[offset:].startswith(shown)
    chat = of_chat([TokenLogprob(token, -1.0, 1) for token in ids], TokenPlaces(tokenizer, prompt))
    assert b"".join(bytes(entry["bytes"]) for entry in chat) == text.encode()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@some
def test_rubbish_before_a_token_does_not_move_it(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    """Bytes that are no character count as many characters as they are shown as."""
    tokenizer = kind()
    word = tokenizer.encode("a the", add_special_tokens=False)[-1]
    broken = [token for token in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.own_text(token)]
    ids = [*data.draw(st.lists(st.sampled_from(broken), max_size=5)), word]
    prompt = tokenizer.encode("a", add_special_tokens=False)
    row = of_completion([(token, None) for token in ids], TokenPlaces(tokenizer, prompt))
    assert tokenizer.decode(ids, prompt)[row["text_offset"][-1] :] == tokenizer.own_text(word)


def test_a_character_of_two_tokens() -> None:
    """Both have its place, and their own bytes; alternatives have theirs."""
    tokenizer = small_tokenizers.sentencepiece()
    first, second, third = tokenizer.encode("世", add_special_tokens=False)[-3:]
    (a,) = tokenizer.encode("xa", add_special_tokens=False)[-1:]
    prompt = [a]
    entries = [TokenLogprob(token, -1.0, 1, ((first, -2.0), (a, -3.0))) for token in (a, first, second, third, a)]
    row = of_completion([(entry.token_id, entry) for entry in entries], TokenPlaces(tokenizer, prompt))
    assert row["text_offset"] == [0, 1, 1, 1, 2]
    chat = of_chat(entries, TokenPlaces(tokenizer, prompt))
    assert [entry["bytes"] for entry in chat] == [[97], [0xE4], [0xB8], [0x96], [97]]
    assert [entry["bytes"] for entry in chat[0]["top_logprobs"]] == [[0xE4], [97]]


def test_a_special_token_stands_behind_the_characters_of_bytes_before_it() -> None:
    """In an answer, where it has no text, and in an echoed prompt, where its name is text."""
    tokenizer = small_tokenizers.sentencepiece()
    text = "世世</s>a b"
    ids = tokenizer.encode(text, add_special_tokens=False)[1:]
    answer, echo = TokenPlaces(tokenizer, [1]), TokenPlaces(tokenizer, source=text)
    assert [answer.push(token) for token in ids[:8]] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [echo.push(token) for token in ids] == [0, 0, 0, 1, 1, 1, 2, 6, 7, 8], "no space that was not sent"


def test_without_a_tokenizer_tokens_are_shown_by_number() -> None:
    entry = TokenLogprob(7, -1.0, 1, ((8, -2.0),))
    row = of_completion([(7, entry)], TokenPlaces(None), {"tokens": ["x"], "token_logprobs": [None],
                                                          "top_logprobs": [None], "text_offset": [0]})  # fmt: skip
    assert (row["tokens"], row["text_offset"]) == (["x", "<token 7>"], [0, 0])
    assert of_chat([entry], TokenPlaces(None))[0]["bytes"] == []


def test_an_echoed_prompt_has_special_tokens_by_name() -> None:
    tokenizer = small_tokenizers.byte_level()
    text = "<|im_start|>a<|end|>b"
    ids = tokenizer.encode(text)
    row = of_completion([(token, None) for token in ids], TokenPlaces(tokenizer, source=text))
    assert [text[offset:] for offset in row["text_offset"]] == [text, "a<|end|>b", "<|end|>b", "b"]
    without = of_completion([(token, None) for token in ids], TokenPlaces(tokenizer))
    assert without["text_offset"] == [0, 0, 1, 1]


def test_the_first_token_of_a_text_reads_as_its_alternatives_do() -> None:
    """So whether it is the likeliest one can be seen by its text (lm-eval does)."""
    tokenizer = small_tokenizers.sentencepiece()
    the, *_ = tokenizer.encode("the", add_special_tokens=False)
    entries = [TokenLogprob(the, -0.5, 1, ((the, -0.5),))] * 2
    row = of_completion([(the, entry) for entry in entries], TokenPlaces(tokenizer, [1]))
    assert row["tokens"] == ["the", " the"]
    assert row["top_logprobs"] == [{"the": -0.5}, {" the": -0.5}]
    first, second = of_chat(entries, TokenPlaces(tokenizer, [1]))
    assert (first["token"], first["bytes"]) == ("the", list(b"the"))
    assert first["top_logprobs"][0]["bytes"] == first["bytes"]
    assert second["top_logprobs"][0]["bytes"] == second["bytes"] == list(b" the")
