"""Log-probabilities in the words of each form: Lockstride's own, OpenAI's completions and chats, vLLM's prompts.

Knows: field names, and how a single token is shown. Does not know: the rest of a row (response.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from runtime.frontend.outputs import TokenLogprob
from runtime.frontend.tokenizer import Tokenizer

Row = dict[str, Any]
Placed = tuple[int, TokenLogprob | None]  # a token and its entry, if it has one


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token on its own; special tokens and those without a text of their own are shown by number."""
    return (tokenizer.decode([token_id]) if tokenizer is not None else "") or f"<token {token_id}>"


def simple(entries: Sequence[TokenLogprob | None]) -> list[Row | None]:
    """The simple form; null where nothing is known, as for a prompt's first token."""
    return [
        None
        if entry is None
        else {"token_id": entry.token_id, "logprob": entry.logprob, "rank": entry.rank, "top": entry.top}
        for entry in entries
    ]


def of_completion(placed: Sequence[Placed], tokenizer: Tokenizer | None) -> Row:
    """``logprobs`` of an OpenAI completion: columns. With ``echo`` the prompt's tokens come first, then the answer's.

    As there and in vLLM, a token's own value stands among ``top_logprobs`` even where it is not among the likeliest.
    """
    texts = [token_text(token, tokenizer) for token, _ in placed]
    return {
        "tokens": texts,
        "token_logprobs": [None if entry is None else entry.logprob for _, entry in placed],
        "top_logprobs": [None if entry is None else _by_text(entry, tokenizer) for _, entry in placed],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }


def _by_text(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Text -> value; of tokens that read the same, the likeliest."""
    shown: dict[str, float] = {}
    for token, value in (*entry.top, (entry.token_id, entry.logprob)):
        shown.setdefault(token_text(token, tokenizer), value)
    return shown


def of_chat(entry: TokenLogprob, tokenizer: Tokenizer | None) -> Row:
    """One token of ``logprobs.content`` of an OpenAI chat."""

    def shown(token_id: int, logprob: float) -> Row:
        text = token_text(token_id, tokenizer)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        **shown(entry.token_id, entry.logprob),
        "top_logprobs": [shown(token_id, value) for token_id, value in entry.top],
    }


def of_prompt(
    entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer | None
) -> list[dict[str, dict[str, float | int | str]] | None]:
    """``prompt_logprobs`` of vLLM: by token id, the likeliest ones and the prompt's own; null for the first token."""

    def shown(token_id: int, logprob: float, rank: int) -> dict[str, float | int | str]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(token_id, tokenizer)}

    def by_id(entry: TokenLogprob) -> dict[str, dict[str, float | int | str]]:
        likely = {str(token): shown(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
        return likely | {str(entry.token_id): shown(entry.token_id, entry.logprob, entry.rank)}

    return [None if entry is None else by_id(entry) for entry in entries]
