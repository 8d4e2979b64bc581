"""Bad words as the token ids that the engine keeps apart.

Knows: that a word may stand at the beginning and after a space, which most tokenizers write as different tokens (so
does vLLM). Does not know: what the engine does with them (runtime/execute/sampling/logit_edits.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.frontend.prompt_text import PIECE, prompt_ids
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
