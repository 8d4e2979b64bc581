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

from models.demo import golden
from models.demo.network import Qwen3, Shape
from models.demo.tokens import pack
from models.demo.train import SMOKE, complete, main
from runtime.schedule.request import SamplingParams

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


def config_shape() -> Shape:
    config = read_json("config.json")
    return Shape(**{name: config[name] for name in Shape.__dataclass_fields__})


def test_weights_are_small_bfloat16_and_named_and_shaped_as_the_configuration_says() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 12_000_000
    expected = {name: tuple(tensor.shape) for name, tensor in Qwen3(config_shape()).state_dict().items()}
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


def test_tokenizer_gives_its_own_training_script_back_in_few_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = (FOLDER / "train.py").read_text(encoding="utf-8")
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


def test_training_network_is_the_architecture_it_is_saved_as(oracle: tuple[Any, Any]) -> None:
    """Packed documents give each what transformers gives it alone: names, rotary layout, norms, and no leak between."""
    network = Qwen3(config_shape())
    network.load_state_dict({k: v for k, v in oracle[0].state_dict().items() if k != "lm_head.weight"})
    rows = [row["prompt_token_ids"] for row in GOLDEN["rows"][:3]]
    batch = pack([torch.tensor(row).numpy() for row in rows], torch.device("cpu"))
    with torch.no_grad():
        ours = network.logits(network.hidden(batch, torch.float32))
        theirs = torch.cat([oracle[0](torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_training_script_runs_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path), "--smoke", "--device", "cpu", "--workers", "1"])
    curve = json.loads((tmp_path / "training.json").read_text())["curve"]
    assert curve[-1]["step"] == SMOKE.steps
    assert curve[-1]["held_out_loss"] < curve[0]["held_out_loss"] - 0.5
    assert "Python standard library" in (tmp_path / "CORPUS.md").read_text()
    model, tokenizer = golden.load(tmp_path)
    network = Qwen3(SMOKE.shape)
    network.load_state_dict({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})
    row = golden.golden_row(model, tokenizer, {"id": "x", "prompt": "def f(x):", "max_tokens": 4})
    text = complete(
        network, Tokenizer.from_file(str(tmp_path / "tokenizer.json")), ["def f(x):"], 4, torch.device("cpu")
    )
    assert text == [tokenizer.decode(row["prompt_token_ids"] + row["token_ids"])]
    assert "held_out_loss" in capsys.readouterr().out
