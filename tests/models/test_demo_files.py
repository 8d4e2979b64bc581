"""The embedded checkpoint is whole, agrees with itself, and is what transformers says it is.

Knows: the files of models/demo and transformers as the oracle. Does not know: our own engine (its parity test does).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from runtime.schedule.request import SamplingParams
from tests.models import demo_golden as golden

FOLDER = golden.FOLDER
SPECIAL = {"<|endoftext|>": 0, "<|pad|>": 1, "<|im_start|>": 2, "<|im_end|>": 3}
GOLDEN = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))
PROMPTS = golden.read_prompts(FOLDER)


# Other vector widths and thread counts sum in another order: a logit of about 20 moves in its sixth digit, and
# golden.json keeps four decimals of the difference of two.
MARGIN_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def oracle() -> tuple[Any, Any]:
    return golden.load(FOLDER)


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return content


def test_weights_are_small_bfloat16_and_named_and_shaped_as_the_configuration_says(oracle: tuple[Any, Any]) -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 12_000_000
    expected = {
        name: tuple(tensor.shape) for name, tensor in oracle[0].state_dict().items() if name != "lm_head.weight"
    }
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert "lm_head.weight" not in tensors
    assert read_json("config.json")["tie_word_embeddings"]


@pytest.mark.parametrize(
    "text",
    [
        'def f(x: int) -> str:\n    """Doc."""\n    return f"{x!r}"\n',
        "if True:\n\tx = 1\r\n\n\n        y = [0x1F, 1_000, 2.5e-3]   \n",
        "name = 'Ünïcödé'  # 你好, мир, שלום, 👩\u200d💻, e\u0301 stays two code points\n",
        "\x00\x7f\ufeff\u2028 odd but legal \U0010ffff",
        "",
    ],
)
def test_tokenizer_gives_every_text_back(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_gives_a_program_back_in_few_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = Path(__file__).read_text(encoding="utf-8")
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(text) / len(ids) > 2.5


def test_special_tokens_agree_in_every_file(oracle: tuple[Any, Any]) -> None:
    model, hf_tokenizer = oracle
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    config, generation = read_json("config.json"), read_json("generation_config.json")
    assert {text: tokenizer.token_to_id(text) for text in SPECIAL} == SPECIAL
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert config["eos_token_id"] == hf_tokenizer.eos_token_id == SPECIAL["<|endoftext|>"]
    assert config["pad_token_id"] == generation["pad_token_id"] == hf_tokenizer.pad_token_id == SPECIAL["<|pad|>"]
    assert generation["eos_token_id"] == [SPECIAL["<|endoftext|>"], SPECIAL["<|im_end|>"]]
    assert type(model).__name__ == config["architectures"][0] == "Qwen3ForCausalLM"


def test_chat_template_is_the_form_the_model_was_trained_on(oracle: tuple[Any, Any]) -> None:
    prompt = next(prompt for prompt in PROMPTS if prompt["id"] == "chat-is-even")
    request = prompt["prompt"].split("\n", 1)[1].split("<|im_end|>")[0]
    turns = [{"role": "user", "content": request}]
    assert oracle[1].apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == prompt["prompt"]


def test_prompts_are_32_distinct_requests_with_known_fields() -> None:
    assert len(PROMPTS) == len({prompt["id"] for prompt in PROMPTS}) == 32
    fields = set(SamplingParams.__dataclass_fields__) | {"id", "prompt"}
    assert all(set(prompt) <= fields for prompt in PROMPTS)
    sampled = [prompt for prompt in PROMPTS if prompt["temperature"] > 0]
    assert sampled
    assert all("seed" in prompt for prompt in sampled)
    assert any("stop" in prompt for prompt in PROMPTS)


def test_golden_rows_cover_the_greedy_prompts_and_end_at_many_lengths() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    greedy = {prompt["id"]: prompt for prompt in PROMPTS if prompt["temperature"] == 0}
    assert [row["id"] for row in GOLDEN["rows"]] == list(greedy)
    for row in GOLDEN["rows"]:
        prompt = greedy[row["id"]]
        assert row["prompt_token_ids"] == tokenizer.encode(prompt["prompt"]).ids
        ended = row["token_ids"][-1] in (SPECIAL["<|endoftext|>"], SPECIAL["<|im_end|>"])
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(row["token_ids"]) == min(prompt["max_tokens"], GOLDEN["max_tokens"])
        assert row["margin"] > 0.01, f"{row['id']}: too close a call to compare engines on"
    ends = {len(row["token_ids"]) for row in GOLDEN["rows"] if row["finish_reason"] == "stop"}
    assert len(ends) >= 10


@pytest.mark.parametrize("name", ["relu", "mkdir", "greet"])
def test_transformers_reproduces_golden_rows(oracle: tuple[Any, Any], name: str) -> None:
    prompt = next(prompt for prompt in PROMPTS if prompt["id"] == name)
    row = next(row for row in GOLDEN["rows"] if row["id"] == name)
    found = golden.golden_row(*oracle, prompt)
    assert found == row | {"margin": pytest.approx(row["margin"], abs=MARGIN_TOLERANCE)}


def test_no_golden_token_is_within_the_tolerance_of_another() -> None:
    """What a margin may move by on another CPU can change no token."""
    assert min(row["margin"] for row in GOLDEN["rows"]) > 10 * MARGIN_TOLERANCE
