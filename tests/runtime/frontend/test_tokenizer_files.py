"""What the files next to tokenizer.json add: the values are those of transformers 5.23; BOS flags
work as in the Llama classes of transformers 4."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.tokenizer_files import TokenizerError, TokenizerFiles
from tests.runtime.frontend import small_tokenizers

END, START, STOP = "<|end|>", "<|im_start|>", "<|im_end|>"
SIZE = small_tokenizers.byte_level_backend().get_vocab_size()
LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": START, "eos_token": END}
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


def folder(path: Path, config: dict[str, Any] | None = None, of_tokenizer: Any = None, **files: Any) -> Path:
    """A model folder with a byte-level tokenizer; ``files``: contents by name without .json."""
    tokenizer = json.loads(small_tokenizers.byte_level_backend().to_str()) | (of_tokenizer or {})
    for name, content in {"tokenizer": tokenizer, "tokenizer_config": config or {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_truncation_and_padding_of_a_trainer_are_off(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padded = {"strategy": {"Fixed": 99}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0}
    settings = {"truncation": cut, "padding": padded | {"pad_type_id": 0, "pad_token": END}}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, of_tokenizer=settings))
    for text in ("hello the end", "hello the end. " * 400):  # long ones take another call of the library
        assert tokenizer.encode(text) == small_tokenizers.byte_level().encode(text)


@pytest.mark.parametrize("special", [True, False])
def test_tokens_that_only_added_tokens_decoder_names(tmp_path: Path, special: bool) -> None:
    by_id = {str(SIZE + 1): {"content": "<b>", **FLAGS, "special": special}}
    by_id |= {str(SIZE): {"content": "<a>", **FLAGS, "special": True}}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, {"added_tokens_decoder": by_id}))
    assert tokenizer.encode("<a><b>") == [SIZE, SIZE + 1]
    assert tokenizer.decode([SIZE, SIZE + 1]) == ("" if special else "<b>")


@pytest.mark.parametrize(
    "special", [{"additional_special_tokens": ["<b>"]}, {"extra_special_tokens": {"image_token": "<b>"}}]
)
def test_added_tokens_of_an_older_file(tmp_path: Path, special: dict[str, Any]) -> None:
    older = {"<b>": SIZE + 1, "<a>": SIZE}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, special, added_tokens=older))
    assert tokenizer.encode("<a><b>") == [SIZE, SIZE + 1]
    assert tokenizer.decode([SIZE, SIZE + 1]) == "<a>"


@pytest.mark.parametrize("named", ["{}", {"content": "{}", **FLAGS}])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_the_end_token_that_a_file_names(tmp_path: Path, file: str, named: Any) -> None:
    """By a text or an object: of an added token, of the vocabulary alone, and of none at all."""
    expected = {STOP: (2,), "the": tuple(small_tokenizers.byte_level().encode("the")), "<none>": ()}
    assert len(expected["the"]) == 1
    for text, ids in expected.items():
        entry = {**named, "content": text} if isinstance(named, dict) else text
        place = folder(tmp_path, **{"config": {}, file: {"eos_token": entry}})
        assert TokenizerFiles(place).end_token_ids(SIZE) == ids
        if ids:
            assert Tokenizer.from_folder(place).decode(ids) == "", "it is special"


def test_no_end_token_beyond_the_vocabulary_or_without_files(tmp_path: Path) -> None:
    assert TokenizerFiles(tmp_path).end_token_ids(SIZE) == ()
    by_id = {str(SIZE): {"content": "<a>", **FLAGS, "special": True}}
    files = TokenizerFiles(folder(tmp_path, {"eos_token": "<a>", "added_tokens_decoder": by_id}))
    assert files.end_token_ids(SIZE) == ()
    assert files.end_token_ids(SIZE + 1) == (SIZE,)
    older = TokenizerFiles(folder(tmp_path, {"eos_token": "<b>"}, added_tokens={"<a>": SIZE, "<b>": SIZE + 1}))
    assert older.end_token_ids(SIZE + 2) == (SIZE + 1,)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": [["<x>", 0.0], ["<a>", -1.5]]}}')
    assert files.end_token_ids(SIZE) == (1,)


def test_an_older_file_without_added_tokens_decoder_is_overruled_by_the_map(tmp_path: Path) -> None:
    newer: dict[str, Any] = {"added_tokens_decoder": {}}
    for config, expected in (({}, STOP), (newer, END)):
        place = folder(tmp_path, {"eos_token": END, "bos_token": None, **config})
        (place / "special_tokens_map.json").write_text(json.dumps({"eos_token": STOP, "bos_token": START}))
        assert TokenizerFiles(place).special_tokens == {"bos_token": START, "eos_token": expected}


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({**LLAMA, "add_bos_token": True}, [1], []),
        ({**LLAMA, "add_bos_token": True, "add_eos_token": True}, [1], [0]),
        ({**LLAMA, "add_bos_token": False, "add_eos_token": True}, [], [0]),
        ({**LLAMA, "add_eos_token": False}, [1], []),
        ({**LLAMA, "add_bos_token": True, "bos_token": None}, [], []),
        ({**LLAMA, "add_bos_token": True, "add_eos_token": True, "bos_token": END}, [0], [0]),
        (LLAMA, [2], []),  # tokenizer.json decides
        ({**LLAMA, "add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}, [2], []),
    ],
)
def test_bos_and_eos_flags_of_llama_s_classes(
    tmp_path: Path, config: dict[str, Any], before: list[int], after: list[int]
) -> None:
    one, text = {"SpecialToken": {"id": STOP, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    ids = {STOP: {"id": STOP, "ids": [2], "tokens": [STOP]}}
    around = {"type": "TemplateProcessing", "single": [one, text], "pair": [one, text], "special_tokens": ids}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, config, {"post_processor": around}))
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [*before, *plain, *after]


@pytest.mark.parametrize("entry", [{"x": {"content": "<a>"}}, {"9": {}}, {"9": "<a>"}, ["<a>"]])
def test_added_tokens_that_cannot_be_used_are_named(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(TokenizerError, match="names added tokens that cannot be used"):
        Tokenizer.from_folder(folder(tmp_path, {"added_tokens_decoder": entry}))


WHOLE: dict[str, Any] = {
    "config": {
        "added_tokens_decoder": {str(SIZE): {"content": "<a>", **FLAGS, "special": True}},
        "additional_special_tokens": ["<b>"],
        "extra_special_tokens": {"image": "<b>"},
        "chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "t"}],
        "bos_token": {"content": START, **FLAGS},
        "eos_token": END,
        "add_bos_token": True,
        "add_eos_token": False,
        "tokenizer_class": "LlamaTokenizerFast",
    },
    "added_tokens": {"<b>": SIZE + 1, "<a>": SIZE},
    "special_tokens_map": {"eos_token": END, "additional_special_tokens": ["<b>"]},
}


def variants(value: Any, odd: Any) -> Iterator[Any]:
    """With ``odd`` in each place in turn."""
    for step in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for part in (odd, *variants(value[step], odd)):
            changed = copy.copy(value)
            changed[step] = part
            yield changed


@pytest.mark.slow
@pytest.mark.parametrize("odd", [True, 5, "x", [], [1], {}, {"a": 1}, {"content": 5}], ids=str)
def test_whatever_a_file_holds_it_is_used_or_refused_by_name(tmp_path: Path, odd: Any) -> None:
    for files in variants(WHOLE, odd):
        folder(tmp_path, **files)
        for read in (Tokenizer.from_folder, ChatTemplate.from_folder, _end_tokens):
            with suppress(TokenizerError):
                read(tmp_path)


def _end_tokens(place: Path) -> tuple[int, ...]:
    return TokenizerFiles(place).end_token_ids(SIZE)


def test_chat_templates_by_name_and_file(tmp_path: Path) -> None:
    """Each place in turn, from the one that all others win over."""

    def read() -> dict[str, str]:
        return TokenizerFiles(tmp_path).chat_templates()

    assert read() == {}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert read() == {"default": "json"}
    folder(tmp_path, {"chat_template": {"default": "object", "rag": "r"}})
    assert read() == {"default": "object", "rag": "r"}
    folder(
        tmp_path, {"chat_template": [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "t"}]}
    )
    assert read() == {"default": "list", "tool_use": "t"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file t")
    assert read() == {"default": "list", "tool_use": "file t"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read() == {"default": "file", "tool_use": "file t"}
