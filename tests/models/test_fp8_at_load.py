"""``--quantization fp8``: a checkpoint of numbers becomes codes with a scale for each whole row, on every split."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.checkpoint import WeightsError
from models.config import ModelConfigError
from models.drafters.draft_config import DFlashConfig, Eagle3Config
from models.drafters.load import load_dflash, load_eagle3, load_own_mtp
from models.fp8_load import AT_LOAD, quantised_at_load
from models.layers.decoder import Decoder
from models.registry import config_from_dict, config_from_folder
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from parallel.layers.experts import ExpertSplit
from runtime.config import ConfigError, EngineConfig
from tests.models.drafters.tiny_drafters import dflash_config, dflash_tensors, eagle3_config, eagle3_tensors
from tests.models.quantised import schemes
from tests.models.test_fp8 import MODELS, answers, check_same, weights
from tests.models.tiny_checkpoint import RankOf, full_tensors, write
from tests.plant import reference_kernels

KEPT = re.compile(r"embed|lm_head|\.gate\.weight|shared_expert_gate|conv1d|router")


def as_codes(numbers: Tensor) -> Tensor:
    """What the codes of a matrix mean: a scale for each row, its largest magnitude / 448, or 1."""
    most = numbers.abs().amax(-1, keepdim=True)
    scale = torch.where(most > 0, most / 448, 1.0)
    return (numbers / scale).to(torch.float8_e4m3fn).float() * scale


def write_both(folder: Path, config: dict[str, Any], files: int = 2) -> tuple[Path, Path]:
    """(folder of numbers, folder of what their codes mean); rows are of different sizes, and some are zero."""
    numbers = full_tensors(config_from_dict(config))
    for name, tensor in numbers.items():
        if tensor.dim() == 2:
            numbers[name] = tensor * torch.logspace(-2, 1, len(tensor)).unsqueeze(1)
            numbers[name][len(tensor) // 2] = 0.0
    meant = {
        name: tensor if KEPT.search(name) or tensor.dim() != 2 else as_codes(tensor) for name, tensor in numbers.items()
    }
    for name, tensors in (("numbers", numbers), ("meant", meant)):
        (folder / name).mkdir()
        write(folder / name, {key: one.clone() for key, one in tensors.items()}, files=files, config=config)
    return folder / "numbers", folder / "meant"


def load(folder: Path, rank: int = 0, size: int = 1, *, option: str | None = None, whole: bool = False) -> Decoder:
    return load_model(
        quantised_at_load(config_from_folder(folder), option),
        folder,
        collectives=SingleRank() if size == 1 else RankOf(rank, size),
        kernels=reference_kernels(),
        experts=ExpertSplit(whole=whole),
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODELS if name != "gpt-oss"])
def test_every_split_has_the_codes_of_whole_rows(model: str, tmp_path: Path) -> None:
    numbers, meant = write_both(tmp_path, MODELS[model])
    for rank, size in ((0, 1), (1, 2)):
        check_same(load(numbers, rank, size, option="fp8"), load(meant, rank, size))
    if "num_experts" in MODELS[model]:
        check_same(load(numbers, 1, 2, option="fp8", whole=True), load(meant, 1, 2, whole=True))


def test_experts_that_are_stored_transposed_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="--quantization fp8 is not implemented for GptOssForCausalLM"):
        quantised_at_load(config_from_dict(MODELS["gpt-oss"]), "fp8")


def test_heads_routers_and_embeddings_keep_their_numbers(tmp_path: Path) -> None:
    numbers, _ = write_both(tmp_path, MODELS["qwen3-moe"])
    found = {name: weight.format.dtype for name, weight in weights(load(numbers, option="fp8"))}
    assert {name for name, dtype in found.items() if dtype != torch.float8_e4m3fn} == {
        *("embedding.weight", "lm_head.weight"),
        *(name for name in found if "router" in name),
    }


def test_a_quantised_checkpoint_stays_as_it_is() -> None:
    config = config_from_dict(MODELS["qwen3"] | {"quantization_config": schemes()["A"].config})
    assert quantised_at_load(config, "fp8") is config
    plain = config_from_dict(MODELS["qwen3"])
    assert quantised_at_load(plain, None) is plain
    assert quantised_at_load(plain, "fp8").quantization is AT_LOAD
    with pytest.raises(ConfigError, match=r"quantization is 'int4', but must be one of fp8: type --quantization fp8"):
        EngineConfig(model="m", quantization="int4")  # type: ignore[arg-type]


def test_dummy_weights_are_codes_too() -> None:
    config = quantised_at_load(config_from_dict(MODELS["qwen3"]), "fp8")
    made = load_model(config, None, load_format="dummy", collectives=SingleRank(), kernels=reference_kernels())
    down = dict(weights(made))["layers.0.mlp.down.weight"]
    assert down.format.block == (1, 0)
    assert 0.8 < float(down.plain(torch.float32).std()) * down.inner**0.5 < 1.2


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    config = MODELS["qwen3"]
    tensors = full_tensors(config_from_dict(config))
    tensors["model.layers.1.mlp.up_proj.weight"][2, 5] = float("inf")
    write(tmp_path, tensors, config=config)
    with pytest.raises(WeightsError, match=r"up_proj.weight' holds numbers that are not finite"):
        load(tmp_path, option="fp8")


@pytest.mark.slow
def test_drafters_become_codes_with_their_target(tmp_path: Path) -> None:
    config = MODELS["qwen3-next"] | {"mtp_num_hidden_layers": 1}
    target = load_model(
        quantised_at_load(config_from_dict(config), "fp8"),
        None,
        load_format="dummy",
        collectives=SingleRank(),
        kernels=reference_kernels(),
    )
    assert "layers.0.mixer.qkv.weight" in coded(load_own_mtp(target, None, load_format="dummy"))
    target = load_model(
        quantised_at_load(config_from_dict(dflash_target()), "fp8"),
        None,
        load_format="dummy",
        collectives=SingleRank(),
        kernels=reference_kernels(),
    )
    for kind, said, tensors in (
        ("dflash", dflash_config(), dflash_tensors(dflash_config())),
        ("eagle3", eagle3_config(), eagle3_tensors(eagle3_config(), range(6))),
    ):
        (folder := tmp_path / kind).mkdir()
        write(folder, tensors, config=said)
        draft: nn.Module
        if kind == "dflash":
            draft = load_dflash(target, DFlashConfig.from_folder(folder), folder)
        else:
            draft = load_eagle3(target, Eagle3Config.from_folder(folder), folder)
        assert coded(draft), kind


def dflash_target() -> dict[str, Any]:
    return MODELS["qwen3"] | {
        "hidden_size": 24,
        "attention_bias": False,
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 4,
    }


def coded(model: nn.Module) -> set[str]:
    return {name for name, weight in weights(model) if weight.format.dtype == torch.float8_e4m3fn}


@pytest.mark.slow
def test_an_engine_answers_as_what_its_codes_mean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers, meant = write_both(tmp_path, MODELS["qwen3-moe"])
    with caplog.at_level("INFO"):
        found = answers(numbers, "auto", quantization="fp8")
    assert found == answers(meant, "auto")
    assert "FP8 (--quantization fp8; a scale for each row), activations as they are (--fp8-act" in caplog.text
