"""The text of an answer: token by token, without its stop string, and the end that its caller sees.

Knows: when text could still turn into a stop string, which tokens belong to an answer that a stop string ended.
Does not know: how ids become text (tokenizer.py), where tokens come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from runtime.frontend.tokenizer import Tokenizer, open_detokenizer
from runtime.schedule.request import FinishReason

_MOST_PIECES: Final = 1024  # of a text that grows, before they are put together


class StopMatcher:
    """Finds the first stop string in a growing text, and holds back what could be the beginning of one.

    Of several, the one that is complete first counts; of those that end together, the longest. So the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(stops)
        if "" in self.stops:
            raise ValueError("a stop string is empty: leave it out")
        self._longest = max(map(len, self.stops), default=1) - 1  # characters that may have to be held back
        self._firsts = frozenset(stop[0] for stop in self.stops)
        self._held = ""
        self._open = 0  # characters of that within which no stop string may end
        self._unseen: list[tuple[int, int]] = []  # parts of that which are not shown
        self.matched: str | None = None

    def push(self, text: str, may_end: bool = True, unseen: bool = False) -> str:
        """Append text; returns the part that may be shown. After a match nothing more is ever shown.

        ``may_end``: a stop string may be complete in it, not only begin. ``unseen``: it is matched, but not shown.
        """
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return "" if unseen else text  # most pieces: no stop string can begin in it
        if unseen:
            self._unseen.append((len(self._held), len(self._held) + len(text)))
        text = self._held + text
        if may_end:
            found = [
                (at + len(stop), at, stop)
                for stop in self.stops
                if (at := text.find(stop, max(0, self._open + 1 - len(stop)))) >= 0
            ]
            if found:
                _, start, self.matched = min(found)
                shown, self._held = self._release(text, start), ""
                return shown
        else:
            self._open = len(text)
        return self._release(text, len(text) - self._hold(text))

    def flush(self) -> str:
        """No text follows: returns what was held."""
        return self._release(self._held, len(self._held))

    @property
    def held(self) -> int:
        """Characters that are held and may be shown later."""
        return len(self._held) - sum(end - begin for begin, end in self._unseen)

    def _release(self, text: str, size: int) -> str:
        """The seen part of the first ``size`` characters; the rest is held from now on."""
        shown, self._held, self._open = text[:size], text[size:], max(0, self._open - size)
        for begin, end in reversed(self._unseen):
            shown = shown[:begin] + shown[end:]
        self._unseen = [(max(0, begin - size), end - size) for begin, end in self._unseen if end > size]
        return shown

    def _hold(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for at in range(max(0, len(text) - self._longest), len(text)):
            if text[at] in self._firsts and any(stop.startswith(text[at:]) for stop in self.stops):
                return len(text) - at
        return 0


class TextStream:
    """The text of one answer while its tokens arrive, ended by the first stop string.

    ``kept`` tokens belong to the answer: after a stop, those up to the one that completed the stop string, which is
    where a serial engine would have ended. A stop string counts where it ends in text of tokens after the first
    ``min_tokens``. Special tokens are no text, but a stop string may name them; those that ``marks`` names are text.
    ``mark``: first and last place, in the text of the answer, of the latest token if ``marks`` names it; its characters
    may be held back until later.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        context: Sequence[int] = (),
        marks: Sequence[str] = (),
    ) -> None:
        self._detokenizer = open_detokenizer(tokenizer, context)
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self._marks = {i: name for i, name in tokenizer.added_ids.items() if name in marks}
        self._names: dict[int, str] = {}  # special tokens that are looked at
        if stop or marks:
            texts = (*stop, *self._marks.values())
            self._names = {i: name for i, name in tokenizer.silent_ids.items() if any(name in text for text in texts)}
        self.kept = 0
        self.mark: tuple[int, int] | None = None
        self._shown = 0  # characters

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    @property
    def text(self) -> str:
        """Everything that may be shown so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Append one token; returns the text that may be shown now. Tokens after a stop are ignored."""
        matcher = self._matcher
        if matcher.matched is not None:
            return ""
        self.kept += 1
        text = self._detokenizer.push(token_id)
        name = self._marks.get(token_id)
        whole = name is not None and (token_id in self._names or text.endswith(name))
        if text and matcher.stops:
            text = matcher.push(text, self.kept > self._min_tokens)
        if token_id in self._names:
            text += matcher.push(self._names[token_id], self.kept > self._min_tokens, token_id not in self._marks)
        self.mark = None
        if name is not None and whole and matcher.matched is None:
            end = self._shown + len(text) + matcher.held
            self.mark = end - len(name), end
        self._shown += len(text)
        if text:
            self._pieces.append(text)
            if len(self._pieces) > _MOST_PIECES:
                self._pieces = [self.text]
        return text

    def finish(self) -> str:
        """No token follows; returns the rest that may be shown."""
        if self.stopped:
            return ""
        text = self._matcher.push(self._detokenizer.flush(), self.kept > self._min_tokens)
        text += self._matcher.flush()
        self._pieces.append(text)
        return text

    def end(self, reason: FinishReason) -> tuple[str, FinishReason]:
        """The engine ended the answer for ``reason``: the rest of its text, and the reason that its caller sees.

        A serial engine would have stopped at a stop string, even if the answer ran into its length meanwhile. The rest
        of an answer that was cut short is not shown: its last bytes show no end."""
        rest = self.finish() if reason in (FinishReason.STOP, FinishReason.LENGTH) else ""
        return rest, FinishReason.STOP if self.stopped else reason
