"""Answer: one answer's tokens to pieces of text, one piece a token, where they are turned into text away from the
engine.

Knows: stop strings, stop ids that are no text, the end that a caller sees. Does not know: how pieces are written down
(launch/serve), where tokens come from (remote_engine.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.frontend.answer_text import TextStream
from runtime.frontend.outputs import TokenLogprob
from runtime.frontend.remote_engine import End, Update
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import FinishReason, SamplingParams


class Piece(NamedTuple):
    """A token and the text that may be shown with it: empty while its bytes, or a stop string, are not complete.

    ``mark``: where its name stands in the whole text, if the reader of the answer looks for it.
    """

    token_id: int
    text: str
    logprob: TokenLogprob | None
    mark: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Gain:
    """``take``'s result. ``found_stop``: its stop string was found just now, and the engine does not know. ``rest``:
    text that was held back and came with an end without tokens; else it stands in the last piece.
    """

    pieces: list[Piece]
    found_stop: bool = False
    rest: str = ""


class Answer:
    """Tokens in, pieces out. ``reason`` is set once the answer has ended, for the reader if not for the engine.

    ``marks``: names of tokens that are text although they are special, and whose places pieces have.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        sampling: SamplingParams,
        stop_token_ids: tuple[int, ...],
        prompt_token_ids: tuple[int, ...],
        marks: Sequence[str] = (),
    ) -> None:
        self._text = None
        if tokenizer is not None:
            self._text = TextStream(tokenizer, sampling.stop, sampling.min_tokens, prompt_token_ids, marks)
        self._stop_ids = frozenset(stop_token_ids)
        self._scored = sampling.logprobs is not None
        self.token_ids = array("i")
        self.reason: FinishReason | None = None
        self.end: End | None = None

    @property
    def text(self) -> str:
        """All of it so far."""
        return "" if self._text is None else self._text.text

    def take(self, update: Update) -> Gain:
        """Tokens after a stop string are dropped: pieces end with the token that completed it."""
        if self.reason is not None:
            self.end = update.end
            return Gain([])
        pieces, text, end = [], self._text, update.end
        last = len(update.token_ids) - 1
        by_id = end is not None and end.reason is FinishReason.STOP
        for at, token in enumerate(update.token_ids):
            ends = by_id and at == last and token in self._stop_ids
            shown = "" if text is None or ends else text.push(token)  # a stop id is no text
            entry = update.logprobs[at] if at < len(update.logprobs) else None
            pieces.append(Piece(token, shown, entry, None if text is None or ends else text.mark))
            self.token_ids.append(token)
            if text is not None and text.stopped:
                self.reason, self.end = FinishReason.STOP, end
                return Gain(pieces, end is None)
        if end is None:
            return Gain(pieces)
        rest, self.reason = ("", end.reason) if text is None else text.end(end.reason)
        self.end = end
        if not pieces:
            return Gain(pieces, rest=rest)
        pieces[-1] = pieces[-1]._replace(text=pieces[-1].text + rest)
        return Gain(pieces)
