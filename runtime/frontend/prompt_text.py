"""A prompt's text to token ids; a text that is too long is refused before most of it is tokenised.

Knows: how many tokens a text has at least, and what tokenising costs: up to 160 bytes and 2 us for each byte; that a
bad word may stand at the beginning and after a space, which most tokenizers write as different tokens (so does vLLM).
Does not know: where a text comes from, chat templates (chat_template.py), which ids are legal (validation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import RequestError, checked_text
from runtime.schedule.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, alone and after a space; each once. Raises RequestError.

    Only these token ids in a row are kept apart: the same letters may still come of other tokens.
    """
    try:
        return _token_ids(words, tokenizer) if words else ()
    except RequestError as error:
        error.field = "bad_words"
        raise


def _token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and the model folder has no tokenizer.json")
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words has {len(words)} words, but at most {MAX_BAD_WORDS} are allowed")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        text = checked_text("a word of bad_words", word).lstrip()
        if not text:
            raise RequestError(f"bad_words has {word[:20]!r}, but a word must have at least one letter")
        if len(text) > 64 * MAX_BAD_WORD_TOKENS:  # no token is that long, and texts are tokenised whole
            raise RequestError(f"bad_words has a word of {len(text)} letters, which is more than can be kept apart")
        for form in (text, " " + text):
            ids = tuple(prompt_ids(tokenizer, form, PIECE, add_special_tokens=False))
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words has {form[:40]!r}, which is {len(ids)} tokens, but may be 1 to {MAX_BAD_WORD_TOKENS}"
                )
            found[ids] = None
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words are {len(found)} rows of token ids, with and without a space, but at most {MAX_BAD_WORDS} are "
            "allowed"
        )
    return tuple(found)


WIDEST_TOKEN: Final = (
    32  # characters for each token that fits; longer texts are refused, even if their tokens are wider
)
PIECE: Final = 1 << 16  # characters that are tokenised at once while their number is not known to fit
_SURE: Final = 1 << 20  # bytes of a text that may be tokenised whole, whatever its tokens are
_USUAL_TOKEN: Final = 8  # bytes: a text that fits rarely has more for each of its tokens
_CUT: Final = 8  # tokens that a piece may have more than its share of the whole text


class PromptTooLong(RequestError):
    """``length``: of the prompt, in words: tokens that it has at least, or characters."""

    def __init__(self, length: str, most: int) -> None:
        super().__init__(f"the prompt has {length}, but prompt and answer together may have {most} tokens: shorten it")
        self.length = length


def prompt_ids(
    tokenizer: Tokenizer,
    text: str,
    most: int,
    characters: int | None = None,
    *,
    add_special_tokens: bool = True,
    continues: bool = False,
) -> list[int]:
    """Ids of ``text``, fewer than about ``most``: callers check the exact number. ``characters``: that it may have, by
    default WIDEST_TOKEN for each token. ``continues``: other text stands before it.

    Raises PromptTooLong, and RequestError for a text that is no Unicode or that the tokenizer fails on.
    """
    checked_text("the prompt", text)
    if tokenizer.longest is not None and len(text) // tokenizer.longest >= most:
        raise PromptTooLong(f"at least {len(text) // tokenizer.longest} tokens", most)
    if len(text) > max(PIECE, WIDEST_TOKEN * most if characters is None else characters):
        raise PromptTooLong(f"{len(text)} characters", most)
    try:
        if len(text) > PIECE and len(text.encode()) > min(_SURE, _USUAL_TOKEN * most):
            _count(tokenizer, text, most)
        if continues:
            return tokenizer.encode_continued(text)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except RequestError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise RequestError(f"the prompt cannot be tokenised: {error}") from error


def _count(tokenizer: Tokenizer, text: str, most: int) -> None:
    """Piece by piece, which costs memory for one piece. Raises PromptTooLong as soon as ``most`` tokens are certain."""
    least = 0
    for at in range(0, len(text), PIECE):
        least += tokenizer.count(text[at : at + PIECE]) - _CUT
        if least >= most:
            raise PromptTooLong(f"at least {least} tokens", most)
