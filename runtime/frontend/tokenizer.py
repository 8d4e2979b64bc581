"""Between text and token ids: a folder's tokenizer, text that grows token by token, and stop strings.

Knows: when a token's text is final, and when it could still turn into a stop string.
Does not know: requests, sampling, the engine; chat templates (chat_template.py).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import tokenizers

from runtime.frontend.tokenizer_files import TokenizerError, TokenizerFiles

_REPLACEMENT: Final = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
_CONTEXT_TOKENS: Final = 6  # the end of the prompt, enough to tell whether an answer starts with a space
_LONGEST_WAIT: Final = 48  # tokens whose text is still open: more, and most of them cannot be
_OPEN_TOKENS: Final = 16  # of those, the last that stay open
_OPEN_CHARACTERS: Final = 4  # the least they must read as: no character has more bytes
_MOST_PIECES: Final = 1024  # of a text that grows, before they are put together
_LONG_TEXT: Final = 4000  # characters: some 5 ms of tokenising


class TokenizingFailed(ValueError):
    """The library failed on a text."""


class Tokenizer:
    """tokenizer.json of a model folder: text to ids and back."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        backend.no_truncation()  # a trainer's settings, which transformers turns off for each call, too
        backend.no_padding()
        kinds = _decoder_kinds(backend)
        # A byte-level decoder joins bytes and nothing else. Others look at what comes before: they strip the first
        # space of a text, and a run of <0xNN> tokens is a character or rubbish only as a whole.
        self.context_free = kinds == {"ByteLevel"}
        self.byte_ids: dict[int, int] = {}  # of tokens that are one byte each: that byte
        if "ByteFallback" in kinds:
            ids = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
            self.byte_ids = {i: byte for i, byte in ids if i is not None}
        self._pieces: dict[int, bytes] = {}
        self._own_texts: dict[int, str] = {}
        self._adds_space: bool | None = None  # before each text; None: nothing asked yet
        self._before: Sequence[int] | None = None  # plain text, after which a token keeps its space
        # Characters of a token, at most; None where one that is unknown may stand for any number of them.
        self.longest: int | None = None
        if kinds & {"ByteLevel", "ByteFallback"}:
            self.longest = max(map(len, backend.get_vocab()), default=1)
        # Special tokens have no text, and what stands around them is decoded as if it stood together.
        added = backend.get_added_tokens_decoder()
        self.added_ids = {i: token.content for i, token in added.items()}
        self.silent_ids = {i: token.content for i, token in added.items() if token.special}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """With what the files around tokenizer.json add to it. Raises TokenizerError when one of them is missing or not
        readable."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: save the model with its fast tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every malformed file
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        TokenizerFiles(folder).complete(backend)
        return cls(backend)

    @classmethod
    def if_any(cls, folder: str | Path) -> Tokenizer | None:
        """``from_folder``, or None for a folder without tokenizer.json. Raises TokenizerError for a broken one."""
        return cls.from_folder(folder) if (Path(folder) / "tokenizer.json").is_file() else None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; with ``add_special_tokens`` also what the tokenizer puts around a text, such as BOS.

        Other threads go on while a long text is tokenised: of the library's calls only that for several texts lets go
        of the interpreter.
        """
        return self._encoding(text, add_special_tokens).ids

    def encode_continued(self, text: str) -> list[int]:
        """Ids of ``text`` after other text: without special tokens, and without the space that SentencePiece and others
        put before a text."""
        if self._adds_space is None:
            ids = self._behind_newline("a")
            self._adds_space = ids is not None and ids != self.encode("a", add_special_tokens=False)
        ids = self._behind_newline(text) if self._adds_space else None
        return self.encode(text, add_special_tokens=False) if ids is None else ids

    def _behind_newline(self, text: str) -> list[int] | None:
        """Ids of ``text`` that follow those of a newline; None if the newline has no tokens that stand alone."""
        before = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        alone = self.decode(before).endswith("\n") and ids[: len(before)] == before
        return ids[len(before) :] if alone else None

    def count(self, text: str) -> int:
        """Tokens of ``text``, without special ones around it."""
        return len(self._encoding(text, False))

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            if len(text) <= _LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=add_special_tokens)
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except BaseException as error:
            raise _without_panic(error) from None

    def decode(self, token_ids: Sequence[int], context: Sequence[int] = ()) -> str:
        """Text of ``token_ids`` without special tokens, as it reads after ``context`` (the end of the prompt)."""
        before = self._usable_context(context)
        text = self._backend.decode([*before, *token_ids], skip_special_tokens=True)
        return text[len(self._backend.decode(before, skip_special_tokens=True)) :] if before else text

    def decode_with_special_tokens(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens by name."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def id_to_token(self, token_id: int) -> str:
        """A token as the vocabulary writes it, which may not be text; nothing for an id that it has not."""
        return self._backend.id_to_token(token_id) or ""

    def own_text(self, token_id: int) -> str:
        """A token's text after other text, with its space; with U+FFFD where it is a part of a character."""
        text = self._own_texts.get(token_id)
        if text is None:
            if self._before is None:
                self._before = () if self.context_free else self.encode("a", add_special_tokens=False)
            text = self._own_texts[token_id] = self.decode([token_id], self._before)
        return text

    def own_bytes(self, token_id: int) -> bytes:
        """What a token adds to the UTF-8 of a text; nothing for a special one."""
        if self.context_free:
            return self.piece(token_id)
        byte = self.byte_ids.get(token_id)
        return self.own_text(token_id).encode() if byte is None else bytes([byte])

    def piece(self, token_id: int) -> bytes:
        """What a token adds to a text's bytes, of a tokenizer that is ``context_free``; nothing for a special one."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> bytes:
        text = self._backend.decode([token_id], skip_special_tokens=True)
        if _REPLACEMENT not in text:
            return text.encode()
        written = self._backend.id_to_token(token_id) or ""  # each character stands for a byte, or it is text as it is
        try:
            return bytes(_BYTE_OF[character] for character in written)
        except KeyError:
            return written.encode()

    def _usable_context(self, context: Sequence[int]) -> list[int]:
        """The part of ``context`` that matters: nothing where it cannot, or where it ends inside a character."""
        if self.context_free or not context:
            return []
        tail = list(context[-_CONTEXT_TOKENS:])
        last = next((token for token in reversed(tail) if token not in self.silent_ids), None)
        if last in self.byte_ids or self._backend.decode(tail, skip_special_tokens=True).endswith(_REPLACEMENT):
            return []
        return tail


class ByteDetokenizer:
    """``Detokenizer`` for tokenizers that are ``context_free``: a token is a piece of bytes, whatever stands before it.

    So a token costs a look-up and the decoding of its own bytes, a tenth of what the window of the other costs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """Append one token; returns the text that became final."""
        return self._decode(self._piece(token_id))

    def flush(self) -> str:
        """No token follows: returns a replacement character for bytes that are no character yet."""
        return self._decode(b"", True)


class Detokenizer:
    """Text of a growing list of token ids: ``"".join(push(t) for t in ids) + flush() == decode(ids, context)``.

    Text is given out once it can no longer change: not while its last bytes are the beginning of a character, nor
    inside a run of byte tokens. Only a short window is decoded for each token: ``ids[start:]``, where ``start`` is the
    settled point before the last one, so that what a decoder does to the beginning of a text happens to a part
    that is already out. (The two-offset method of Hugging Face's text-generation-inference and of vLLM.)
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = tokenizer._usable_context(context)
        self._emitted = len(self._window)  # the window's ids before this are out completely
        self._shown = len(tokenizer.decode(self._window))  # characters of the window's text that are out
        self._in_byte_run = False

    def push(self, token_id: int) -> str:
        """Append one token; returns the text that became final."""
        self._window.append(token_id)
        if token_id not in self._tokenizer.silent_ids:
            self._in_byte_run = token_id in self._tokenizer.byte_ids
        if self._in_byte_run:
            return ""
        text = self._tokenizer.decode(self._window)
        final = text.rstrip(_REPLACEMENT)
        if len(self._window) - self._emitted > _LONGEST_WAIT and len(final) < len(text):
            return self._close_most(text)
        if len(final) <= self._shown:
            return ""
        fresh = final[self._shown :]
        self._shown = len(final)
        if len(final) == len(text):
            self._window = self._window[self._emitted :]
            self._emitted = len(self._window)
            self._shown = len(self._tokenizer.decode(self._window))
        return fresh

    def _close_most(self, text: str) -> str:
        """A model may write rubbish for ever, and the window must not grow with it: all but its last tokens are cut off
        where that changes nothing. A character that stands across the cut shows, because its halves read otherwise; one
        that begins after it cannot reach further back.
        """
        cut = len(self._window) - _OPEN_TOKENS
        closed, still_open = self._tokenizer.decode(self._window[:cut]), self._tokenizer.decode(self._window[cut:])
        if closed + still_open != text or len(still_open) < _OPEN_CHARACTERS:
            return ""  # the next token tries again
        fresh, shown = closed[self._shown :], max(0, self._shown - len(closed))
        self._window, self._emitted, self._shown = self._window[cut:], 0, shown
        return fresh

    def flush(self) -> str:
        """No token follows: returns what was held, with a replacement character for bytes that are no character."""
        text = self._tokenizer.decode(self._window)
        fresh = text[self._shown :]
        self._shown = len(text)
        return fresh


def open_detokenizer(tokenizer: Tokenizer, context: Sequence[int] = ()) -> ByteDetokenizer | Detokenizer:
    """For an answer to a prompt that ends with ``context``."""
    return ByteDetokenizer(tokenizer) if tokenizer.context_free else Detokenizer(tokenizer, context)


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


def _without_panic(error: BaseException) -> BaseException:
    """``error``, or what is raised in place of a panic of the library: that is no Exception, and ends processes."""
    return TokenizingFailed(str(error)) if type(error).__name__ == "PanicException" else error


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level tokenizers write each byte as a character that can be seen (GPT-2's ``bytes_to_unicode``)."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _bytes_of_characters()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """Names of the decoder's parts, as tokenizer.json has them."""
    if backend.decoder is None:
        return set()
    decoder = json.loads(backend.decoder.__getstate__())  # JSON, and without the vocabulary that to_str() writes
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {part["type"] for part in parts}
