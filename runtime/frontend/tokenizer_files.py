"""What a model folder says of texts outside tokenizer.json: special tokens by name, added tokens, chat templates.

Knows: the files, their older and newer forms, and which one wins, as in transformers.
Does not know: the ids of a text (tokenizer.py), how a template is rendered (chat_template.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers
from tokenizers.processors import TemplateProcessing

SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS: Final = ("lstrip", "rstrip", "single_word", "normalized", "special")
# Tokenizer classes of transformers whose add_bos_token and add_eos_token replace tokenizer.json's post-processor.
_WITH_BOS_FLAGS: Final = {f"{family}Tokenizer{end}" for family in ("Llama", "CodeLlama", "Gemma", "Cohere")
                          for end in ("", "Fast")}  # fmt: skip


class TokenizerError(ValueError):
    """A model folder's tokenizer files are missing or cannot be read."""


class TokenizerFiles:
    """tokenizer_config.json, special_tokens_map.json, added_tokens.json and the files of chat templates.

    ``special_tokens``: texts by name, such as ``eos_token``. Raises TokenizerError for a file that is no JSON object.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._config = self._object("tokenizer_config.json")
        older = self._object("special_tokens_map.json")
        # transformers: a file with added_tokens_decoder is complete, an older one is overruled by the map.
        self._named = {**older, **self._config} if "added_tokens_decoder" in self._config else {**self._config, **older}
        texts = {name: _token_text(self._named.get(name)) for name in SPECIAL_TOKENS}
        self.special_tokens = {name: text for name, text in texts.items() if text is not None}

    def chat_templates(self) -> dict[str, str]:
        """Sources by name: ``default``, and others such as ``tool_use``. Files in Jinja win over tokenizer_config.json,
        and that over chat_template.json, which older processors have."""
        files = [self._folder / "chat_template.jinja", *(self._folder / "additional_chat_templates").glob("*.jinja")]
        found = {"default" if file == files[0] else file.stem: read_text(file) for file in files if file.is_file()}
        for holder in (self._config, self._object("chat_template.json")):
            if "default" not in found:
                found = {**_templates(holder.get("chat_template")), **found}
        return found

    def complete(self, backend: tokenizers.Tokenizer) -> None:
        """Adds to a tokenizer.json what only these files say: added tokens, and BOS and EOS around texts."""
        try:
            backend.add_tokens(self._added_tokens(backend))
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise TokenizerError(f"{self._folder} names added tokens that cannot be used: {error!r}") from error
        bos, eos = self._config.get("add_bos_token"), self._config.get("add_eos_token")
        if str(self._config.get("tokenizer_class")) in _WITH_BOS_FLAGS and (bos is not None or eos is not None):
            wanted = {"bos_token": bos is not False, "eos_token": bool(eos)}
            texts = [text for name, text in self.special_tokens.items() if wanted.get(name)]
            ids = {text: at for text in texts if (at := backend.token_to_id(text)) is not None}
            first, last = (self.special_tokens.get(name) if wanted[name] else None for name in wanted)
            single = [part for part in (first, "$A", last) if part == "$A" or part in ids]
            backend.post_processor = TemplateProcessing(single=single, special_tokens=list(ids.items()))

    def _added_tokens(self, backend: tokenizers.Tokenizer) -> list[tokenizers.AddedToken]:
        """Sorted by id: the library gives each that is new the next free one."""
        there = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        several = (self._named.get(name) or () for name in ("additional_special_tokens", "extra_special_tokens"))
        several = (tokens.values() if isinstance(tokens, dict) else tokens for tokens in several)
        special = [*map(self._named.get, SPECIAL_TOKENS), *(token for tokens in several for token in tokens)]
        if "added_tokens_decoder" in self._config:
            added = {entry["content"]: _added(entry) for _, entry in self._by_id()}
        else:
            older, texts = self._object("added_tokens.json"), set(map(_token_text, special))
            listed = sorted(older, key=older.__getitem__)
            added = there | {text: _added({"content": text, "special": text in texts}) for text in listed}
        for token in special:
            text = _token_text(token)
            if text in added:
                added[text].special |= text in self.special_tokens.values()
            elif text is not None and text not in there and backend.token_to_id(text) is not None:
                entry = token if isinstance(token, dict) else {"content": text}
                added[text] = _added({**entry, "special": True})
        return list(added.values())

    def end_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The id of ``eos_token``, read without building a tokenizer; nothing where no file names it."""
        text, path = self.special_tokens.get("eos_token"), self._folder / "tokenizer.json"
        if text is None or not path.is_file():
            return ()
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_TokenizerJson)
            ids = {token["content"]: int(at) for at, token in self._by_id()}
            if "added_tokens_decoder" not in self._config:
                ids = {content: int(at) for content, at in self._object("added_tokens.json").items()}
        except (AttributeError, OSError, TypeError, ValueError, KeyError):  # reported where texts are needed
            return ()
        vocab = file.model.vocab
        ids |= vocab if isinstance(vocab, dict) else {piece: at for at, (piece, _) in enumerate(vocab)}
        ids |= {token.content: token.id for token in file.added_tokens}
        found = ids.get(text, -1)
        return (found,) if 0 <= found < vocab_size else ()

    def _by_id(self) -> list[tuple[str, Any]]:
        return sorted(self._config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))

    def _object(self, name: str) -> dict[str, Any]:
        """The content of a JSON file without its nulls; empty where there is no such file."""
        path = self._folder / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(read_text(path))
        except (json.JSONDecodeError, RecursionError) as error:
            raise TokenizerError(f"{path} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise TokenizerError(f"{path} holds a {type(value).__name__}, not an object")
        return {name: entry for name, entry in value.items() if entry is not None}


class _Token(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerJson(msgspec.Struct):
    added_tokens: list[_Token] = []
    model: _Model = msgspec.field(default_factory=_Model)


def read_text(path: Path) -> str:
    """Raises TokenizerError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _templates(entry: object) -> dict[str, str]:
    """``chat_template`` is a text, or several by name: as a list, or as an object."""
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        entry = {str(item.get("name")): item.get("template") for item in entry if isinstance(item, dict)}
    named = entry if isinstance(entry, dict) else {}
    return {name: source for name, source in named.items() if isinstance(source, str)}


def _token_text(entry: object) -> str | None:
    """A special token is written as text or as an object with ``content``."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _added(entry: dict[str, Any]) -> tokenizers.AddedToken:
    flags = {name: bool(entry[name]) for name in _FLAGS if entry.get(name) is not None}
    return tokenizers.AddedToken(entry["content"], **{"normalized": not flags.get("special"), **flags})
