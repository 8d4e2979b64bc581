"""Texts that are too long are refused by their length, and before most of them is tokenised."""

from __future__ import annotations

from unittest import mock

import pytest
import tokenizers
from tokenizers import models

from runtime.frontend.prompt_text import PIECE, WIDEST_TOKEN, PromptTooLong, prompt_ids
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import RequestError
from tests.runtime.frontend import small_tokenizers


def unknown_words() -> Tokenizer:
    """Of which a token may stand for any number of characters."""
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({"?": 0}, unk_token="?")))


@pytest.mark.parametrize(
    ("tokenizer", "text", "most", "pieces"),
    [
        (small_tokenizers.byte_level(), "a" * 10_000, 100, 0),
        (small_tokenizers.byte_level(), "a" * (WIDEST_TOKEN * 3000), 2000, 0),
        (unknown_words(), "a" * (WIDEST_TOKEN * 3000 + 1), 3000, 0),
        (small_tokenizers.sentencepiece(), "你" * (2 * PIECE), 40_000, 1),
        (small_tokenizers.byte_level(), "z" * (4 * PIECE), 30_000, 1),
        (small_tokenizers.byte_level(), "z" * (4 * PIECE), 3 * PIECE - 24, 3),
    ],
)
def test_a_long_text_is_refused_by_its_length_or_by_its_first_pieces(
    tokenizer: Tokenizer, text: str, most: int, pieces: int
) -> None:
    seen: list[int] = []
    count = tokenizer.count

    def counted(text: str) -> int:
        seen.append(len(text))
        return count(text)

    with (
        mock.patch.multiple(tokenizer, count=counted, encode=None),
        mock.patch("runtime.frontend.prompt_text._SURE", 0),
        pytest.raises(PromptTooLong, match="tokens: shorten it"),
    ):
        prompt_ids(tokenizer, text, most)
    assert seen == [PIECE] * pieces


@pytest.mark.parametrize("tokenizer", [small_tokenizers.byte_level(), small_tokenizers.sentencepiece()])
def test_a_text_that_fits_has_its_own_tokens_also_where_they_were_counted_before(tokenizer: Tokenizer) -> None:
    text = "the quick brown fox " * 4000
    ids = tokenizer.encode(text)
    assert len(text) > PIECE
    with mock.patch("runtime.frontend.prompt_text._SURE", 0):
        assert prompt_ids(tokenizer, text, len(ids)) == ids
        with pytest.raises(PromptTooLong):
            prompt_ids(tokenizer, text, len(ids) - len(ids) // 10)


def test_a_panic_of_the_library_is_a_request_s_error() -> None:
    """It is no Exception: it went through every ``except Exception`` and ended the process."""
    backend = small_tokenizers.panicking_backend()
    with pytest.raises(BaseException, match="non-zero") as raised:
        backend.encode("abc")
    assert not isinstance(raised.value, Exception)
    for text in ("abc", "abc" * 4000):
        with pytest.raises(RequestError, match="the prompt cannot be tokenised: chunk size must be non-zero"):
            prompt_ids(Tokenizer(backend), text, 20_000)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_signal_meanwhile_is_no_panic(error: type[BaseException]) -> None:
    tokenizer = small_tokenizers.byte_level()
    tokenizer._backend = mock.Mock(**{"encode.side_effect": error})
    with pytest.raises(error):
        prompt_ids(tokenizer, "abc", 100)
