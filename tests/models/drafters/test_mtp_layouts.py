"""MTP layers in targets' own checkpoints under DeepSeek-V3's and Nemotron-H's names, against the serial oracle; what is
refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import WeightsError
from models.drafters.draft_config import MTPConfig
from models.drafters.load import check_own_mtp, load_mtp, load_own_mtp
from models.registry import config_from_dict, config_from_folder
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from tests.models.drafters.test_drafters import TARGET, compare_drafts, compare_guesses, target
from tests.models.drafters.tiny_drafters import (
    SIZES,
    blocks_tensors,
    mtp_config,
    mtp_tensors,
    nextn_tensors,
    write,
)
from tests.models.test_parity import COMMON, MODELS
from tests.models.tiny_checkpoint import TINY, full_tensors
from tests.models.tiny_families import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.plant import reference_kernels
from tests.selection import covering

DENSE = {**TARGET, "num_nextn_predict_layers": 1}
SPARSE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}
HYBRID = {**SIZES, **NEMOTRON, "tie_word_embeddings": False, "num_nextn_predict_layers": 1}


def hybrid(pattern: str) -> dict[str, Any]:
    return {**HYBRID, "mtp_hybrid_override_pattern": pattern}


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_a_layer_under_deepseeks_names_guesses_as_the_oracle(tmp_path: Path, config: dict[str, Any]) -> None:
    """It lies behind the target's last layer; what repeats the target's embedding and head is left unread."""
    stored = full_tensors(config_from_dict(config)) | nextn_tensors(config, layer=2)
    wrong = torch.zeros(SIZES["vocab_size"], SIZES["hidden_size"])
    stored |= {f"model.layers.2.{name}.weight": wrong.clone() for name in ("embed_tokens", "shared_head.head")}
    folder = write(tmp_path, config, stored)
    read = load_model(config_from_dict(config), folder, collectives=SingleRank(), kernels=reference_kernels())
    compare_guesses(read, load_own_mtp(read, folder), config, mtp_tensors(config))


@pytest.mark.parametrize(("family", "norm"), [("glm", "shared_head.norm"), ("hy3", "final_layernorm")])
def test_a_sparse_layer_has_the_names_and_shapes_of_its_others(family: str, norm: str, tmp_path: Path) -> None:
    """Its tensors are those of the target's sparse layer, which the target reads under another number. HY3's are named
    as in vLLM's hy_v3_mtp.py."""
    config = TINY | FAMILIES[family] | {"attention_bias": True, "num_nextn_predict_layers": 1}
    stored = full_tensors(config_from_dict(config))
    hidden, last = (
        config["hidden_size"],
        {name: one for name, one in stored.items() if name.startswith("model.layers.1.")},
    )
    stored |= {name.replace("layers.1.", "layers.2."): one.clone() for name, one in last.items()}
    stored |= {f"model.layers.2.{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", norm)}
    stored["model.layers.2.eh_proj.weight"] = torch.ones(hidden, 2 * hidden)
    if family == "hy3":
        stored["model.layers.2.shared_head.weight"] = stored["lm_head.weight"].clone()
    folder = write(tmp_path, config, stored)
    read = load_model(config_from_folder(folder), folder, collectives=SingleRank(), kernels=reference_kernels())
    (layer,), expected = load_own_mtp(read, folder).layers, dict(read.layers[1].named_parameters())
    found = dict(layer.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in found.items())
    assert {"mlp.router.bias", "mixer.q_norm.weight", "mixer.qkv.weight_bias"} <= found.keys()
    assert ("mixer.output.weight_bias" in found) == (family == "hy3")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "norm"), [("glm4moe", "shared_head.norm."), ("hyv3", "final_layernorm.")])
def test_a_sparse_layer_drafts_as_transformers_does(model: str, norm: str, tmp_path: Path) -> None:
    """MtpModel of transformers, a token a pass and without a cache, over random weights and biases of a router."""
    import transformers
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(3)
    family, settings = MODELS[model]
    config = getattr(transformers, f"{family}Config")(**COMMON | settings, num_nextn_predict_layers=1)
    of_oracle = {"num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]}  # which transformers does not read of HY3
    vars(config).update(of_oracle)
    main = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    oracle = MtpModel(main, 1).eval()
    for key in of_oracle:
        del vars(config)[key]
    for name, tensor in {**main.state_dict(), **oracle.layers.state_dict()}.items():
        torch.nn.init.normal_(tensor, mean=float("norm" in name), std=0.2)
    main.save_pretrained(tmp_path)
    outer = {"mtp_block.": "", "post_norm.": norm}
    layer = {f"model.layers.2.{name}": tensor for name, tensor in oracle.layers[0].state_dict().items()}
    for theirs, stored in outer.items():
        layer = {name.replace(theirs, stored): tensor for name, tensor in layer.items()}
    save_file(load_file(tmp_path / "model.safetensors") | layer, tmp_path / "model.safetensors")
    read = load_model(config_from_folder(tmp_path), tmp_path, collectives=SingleRank(), kernels=reference_kernels())
    assert any(name.endswith("e_score_correction_bias") for name in layer)
    compare_drafts(read, load_own_mtp(read, tmp_path), partial(_drafted_by, oracle))


@torch.inference_mode()
def _drafted_by(oracle: Any, tokens: list[int], hidden_TN: Tensor, count: int) -> list[int]:
    drafted: list[int] = []
    for _ in range(count):
        ids = torch.tensor([[*tokens[1:], *drafted]])
        places = torch.arange(ids.shape[1])[None]
        out_TN = oracle.forward_layer(0, hidden_TN[None], places, None, input_ids=ids)[0]
        hidden_TN = torch.cat((hidden_TN, out_TN[-1:]))
        drafted.append(int(oracle.shared_head(out_TN[-1]).argmax()))
    return drafted


def test_a_drafters_folder_may_use_them_too(tmp_path: Path) -> None:
    config, model = mtp_config(), target()
    draft = load_mtp(model, MTPConfig.from_dict(config), write(tmp_path, config, nextn_tensors(config, layer=0)))
    compare_guesses(model, draft, config, mtp_tensors(config))


@pytest.mark.parametrize(("pattern", "words"), covering(["*E", "*-", "*", "*-E"], [False, True], at_once=1))
def test_a_nemotron_h_layer_guesses_as_the_oracle(tmp_path: Path, pattern: str, words: bool) -> None:
    """Beside a target that is loaded from the same folder; either spelling of the pattern."""
    config = hybrid(pattern)
    kinds = {"*": "full_attention", "E": "moe", "-": "mlp"}
    written = {**HYBRID, "mtp_layers_block_type": [kinds[letter] for letter in pattern]} if words else config
    tensors = blocks_tensors(config)
    folder = write(tmp_path, written, full_tensors(config_from_dict(HYBRID)) | tensors)
    read = load_model(config_from_folder(folder), folder, collectives=SingleRank(), kernels=reference_kernels())
    compare_guesses(read, load_own_mtp(read, folder), config, tensors)


def test_a_nemotron_h_layer_with_latent_experts_guesses_as_the_oracle(tmp_path: Path) -> None:
    config = hybrid("*E") | {"moe_latent_size": 6}
    tensors = blocks_tensors(config)
    folder = write(tmp_path, config, full_tensors(config_from_dict(config)) | tensors)
    read = load_model(config_from_folder(folder), folder, collectives=SingleRank(), kernels=reference_kernels())
    compare_guesses(read, load_own_mtp(read, folder), config, tensors)


def test_without_a_pattern_it_is_attention_and_experts() -> None:
    assert config_from_dict(HYBRID).mtp_blocks == ("attention", "moe")
    assert config_from_dict({**HYBRID, "num_nextn_predict_layers": 0}).mtp_blocks == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (hybrid("M*"), "'mtp_hybrid_override_pattern'.*only attention followed by MLPs or experts"),
        (hybrid("**"), "blocks of the MTP layer are attention, attention"),
        (hybrid("*?"), r"'mtp_hybrid_override_pattern' is '\*\?'; known kinds are"),
        ({**hybrid("*E"), "hybrid_override_pattern": "M-*M--"}, "describes no experts"),
        ({**HYBRID, "num_nextn_predict_layers": 2}, "2 MTP layers"),
        ({**TARGET, "architectures": ["LlamaForCausalLM"]}, "an MTP layer of LlamaForCausalLM itself.*Nemotron-H"),
        ({**TARGET, "architectures": ["DeepseekV3ForCausalLM"]}, "'DeepseekV3ForCausalLM' is not implemented"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_own_mtp(config_from_dict(config), None, load_format="dummy")


def test_checkpoints_that_are_not_what_their_config_says_are_refused_by_name(tmp_path: Path) -> None:
    dense, sizes = config_from_dict(DENSE), SIZES["hidden_size"]
    tensors = nextn_tensors(DENSE, layer=2)
    latent = {"model.layers.2.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(8, sizes)}
    with pytest.raises(WeightsError, match=r"multi-head latent attention \(model\.layers\.2\.self_attn\.kv_a_proj"):
        check_own_mtp(dense, write(tmp_path / "latent", DENSE, tensors | latent))
    twice = tensors | nextn_tensors(DENSE, layer=3)
    with pytest.raises(WeightsError, match=r"2 MTP layers \(model\.layers\.2, 3\)"):
        check_own_mtp(dense, write(tmp_path / "twice", DENSE, twice))
    with pytest.raises(WeightsError, match=r"no MTP layer: none of its tensors is named model\.layers\.2\.\*"):
        check_own_mtp(dense, write(tmp_path / "none", DENSE, full_tensors(dense)))
    config = hybrid("*E")
    folder = write(tmp_path / "blocks", config, blocks_tensors(hybrid("*E-")))
    with pytest.raises(WeightsError, match=r"holds 3 blocks of an MTP layer.*names 2: attention, moe"):
        check_own_mtp(config_from_dict(config), folder)
    missing = blocks_tensors(config)
    del missing["mtp.layers.1.final_layernorm.weight"]
    with pytest.raises(WeightsError, match=r"no file holds.*mtp\.layers\.1\.final_layernorm\.weight"):
        load_own_mtp(target(config), write(tmp_path / "missing", config, missing))
