"""Between text and token ids: a folder's tokenizer, and text that grows token by token.

Knows: when a token's text is final. Does not know: stop strings (answer_text.py), requests, sampling, the engine; chat
templates (chat_template.py).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import tokenizers

from runtime.frontend.tokenizer_files import TokenizerError, TokenizerFiles

_REPLACEMENT: Final = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
_CONTEXT_TOKENS: Final = 6  # the end of the prompt, enough to show whether an answer starts with a space
_LONGEST_WAIT: Final = 48  # tokens whose text is still open: more, and most of them cannot be
_OPEN_TOKENS: Final = 16  # of those, the last that stay open
_OPEN_CHARACTERS: Final = 4  # the least they must read as: no character has more bytes
_BEFORE: Final = "\n.,0"  # characters of which one hardly ever joins a token of the text after it
_LONG_TEXT: Final = 4000  # characters: some 5 ms of tokenising


class TokenizingFailed(ValueError):
    """The library failed on a text."""


def no_tokenizer(folder: Path) -> str:
    """A warning for a folder without tokenizer.json, with what to do where it has a tokenizer of another form."""
    others = [path.name for path in (folder / "tekken.json", *folder.glob("*.model"), *folder.glob("*.tiktoken"))]
    found = next((name for name in others if (folder / name).is_file()), None)
    hint = f"; {found} is not read: put the tokenizer.json of the same model into the folder" if found else ""
    return f"{folder} has no tokenizer.json: only token ids are understood, and answers have no text{hint}"


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

    def to_json(self) -> str:
        """As tokenizer.json, completed."""
        return str(self._backend.to_str())

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
            ids = self._after_character("a")
            self._adds_space = ids is not None and ids != self.encode("a", add_special_tokens=False)
        ids = self._after_character(text) if self._adds_space else None
        return self.encode(text, add_special_tokens=False) if ids is None else ids

    def _after_character(self, text: str) -> list[int] | None:
        """Ids of ``text`` that follow those of a newline or another character; None if none has tokens that stand
        alone."""
        for character in _BEFORE:
            before = self.encode(character, add_special_tokens=False)
            ids = self.encode(character + text, add_special_tokens=False)
            if self.decode(before).endswith(character) and ids[: len(before)] == before:
                return ids[len(before) :]
        return None

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


def tokenizer_json(folder: str | Path) -> str | None:
    """``Tokenizer.to_json`` of a model's folder; None without a tokenizer."""
    tokenizer = Tokenizer.if_any(folder)
    return None if tokenizer is None else tokenizer.to_json()


def added_tokens(tokenizer: Tokenizer | None) -> dict[str, int]:
    """Ids of the tokens that no other tokens spell."""
    return {} if tokenizer is None else {text: i for i, text in tokenizer.added_ids.items()}


class ByteDetokenizer:
    """``Detokenizer`` for tokenizers that are ``context_free``: a token is a piece of bytes, whatever stands before it.

    So a token costs a look-up and the decoding of its bytes, a tenth of what the window of the other costs.
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
