"""A prompt's text to token ids; a text that is too long is refused before most of it is tokenised.

Knows: how many tokens a text has at least, and what tokenising costs: up to 160 bytes and 2 us for each byte.
Does not know: where a text comes from, chat templates (chat_template.py), which ids are legal (validation.py).
"""

from __future__ import annotations

from typing import Final

from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import RequestError, checked_text

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
