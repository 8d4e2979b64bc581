"""Log-probabilities in the words of each form: Lockstride's own, OpenAI's completions and chats, vLLM's prompts.

Knows: field names, how a single token is shown, where it stands in a text. Does not know: the rest of a row
(response.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.frontend.outputs import TokenLogprob
from runtime.frontend.tokenizer import Tokenizer

Row = dict[str, Any]
Placed = tuple[int, TokenLogprob | None]  # a token and its entry, if it has one


class TokenPlaces:
    """Text, bytes and place of an answer's tokens, while they come, after a prompt that ends with ``context``.

    ``at``: characters of the text so far. ``source``: the text that the tokens were made from, which may have special
    tokens by their names.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, context: Sequence[int] = (), at: int = 0, source: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.at = at
        self._source = source or ""
        self._context = context
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._begun = self._first = False  # there is text; there was none before the latest token
        self._run = bytearray()  # of tokens that are one byte each: a text only as a whole

    def push(self, token_id: int) -> int:
        """The offset of the next token. Parts of a character have the character's."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return self.at
        begin = self.at + len(self._run.decode("utf-8", "ignore"))
        self._first = not self._begun
        name = tokenizer.silent_ids.get(token_id)
        if name is not None and self._source.startswith(name, begin):
            self.at = begin + len(name)
            self._run.clear()
            return begin
        _, own = self.shown(token_id)
        self._begun = self._begun or bool(tokenizer.own_bytes(token_id))
        if token_id in tokenizer.byte_ids:
            self._run += own
        if token_id in tokenizer.byte_ids or not own:
            return begin
        if self._run:
            whole = self._run.decode("utf-8", "ignore")
            self.at += len(whole) if whole.encode() == self._run else len(self._run)
            self._run.clear()
            begin = self.at
        if own[:1] == b" " and self._source and not self._source.startswith(" ", self.at):
            own = own[1:]  # SentencePiece's own, behind a special token
        fresh, text = self._decode(own), own.decode("utf-8", "replace")
        self.at += len(fresh)
        return self.at - len(text) if fresh.endswith(text) else begin

    def shown(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of a token in the place of the latest one, where the first of a whole text may lose its space.
        The bytes of an answer's tokens, put together, are its UTF-8."""
        tokenizer = self.tokenizer
        own = b"" if tokenizer is None else tokenizer.own_bytes(token_id)
        if own and self._first and tokenizer and not tokenizer.context_free and token_id not in tokenizer.byte_ids:
            own = tokenizer.decode([token_id], self._context).encode()
        return own.decode("utf-8", "replace") or f"<token {token_id}>", own


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token on its own; special tokens and those without a text are shown by number."""
    return (tokenizer.own_text(token_id) if tokenizer is not None else "") or f"<token {token_id}>"


def simple(entries: Sequence[TokenLogprob | None]) -> list[Row | None]:
    """The simple form; null where nothing is known, as for a prompt's first token."""
    return [
        None
        if entry is None
        else {"token_id": entry.token_id, "logprob": entry.logprob, "rank": entry.rank, "top": entry.top}
        for entry in entries
    ]


def of_completion(placed: Iterable[Placed], places: TokenPlaces, before: Row | None = None) -> Row:
    """``logprobs`` of an OpenAI completion: columns, added to those of ``before`` (with ``echo``, the prompt's).

    As there and in vLLM, a token's own value stands among ``top_logprobs`` even where it is not among the best.
    """
    row: Row = before or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in placed:
        row["text_offset"].append(places.push(token))
        row["tokens"].append(places.shown(token)[0])
        row["token_logprobs"].append(None if entry is None else entry.logprob)
        row["top_logprobs"].append(None if entry is None else _by_text(entry, places))
    return row


def _by_text(entry: TokenLogprob, places: TokenPlaces) -> dict[str, float]:
    """Text -> value; of tokens that read the same, the best."""
    by_text: dict[str, float] = {}
    for token, value in (*entry.top, (entry.token_id, entry.logprob)):
        by_text.setdefault(places.shown(token)[0], value)
    return by_text


def of_chat(entries: Iterable[TokenLogprob], places: TokenPlaces) -> list[Row]:
    """``logprobs.content`` of an OpenAI chat."""

    def row(token_id: int, logprob: float) -> Row:
        text, own = places.shown(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(own)}

    rows = []
    for entry in entries:
        places.push(entry.token_id)
        top = [row(token, value) for token, value in entry.top]
        rows.append({**row(entry.token_id, entry.logprob), "top_logprobs": top})
    return rows


def of_prompt(
    entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer | None
) -> list[dict[str, dict[str, float | int | str]] | None]:
    """``prompt_logprobs`` of vLLM: by token id, the best ones and the prompt's own; null for the first token."""

    def shown(token_id: int, logprob: float, rank: int) -> dict[str, float | int | str]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(token_id, tokenizer)}

    def by_id(entry: TokenLogprob) -> dict[str, dict[str, float | int | str]]:
        likely = {str(token): shown(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
        return likely | {str(entry.token_id): shown(entry.token_id, entry.logprob, entry.rank)}

    return [None if entry is None else by_id(entry) for entry in entries]
