"""Which class serves which architecture name of config.json, and how a model folder becomes a ModelConfig.

Knows: the list of families, and folders that are of other formats. Does not know: anything about the models on it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoint import WeightsError, locate_tensors, stored_dtype
from models.config import (
    DTYPES,
    ModelConfig,
    ModelConfigError,
    architecture_of,
    differing_keys,
    model_config,
    read_json_object,
    token_ids,
)
from models.families.ernie4_5 import Ernie45, Ernie45Moe
from models.families.gemma3 import Gemma3
from models.families.gemma4 import Gemma4
from models.families.glm4 import Glm, Glm4
from models.families.glm4_moe import Glm4Moe
from models.families.gpt_oss import GptOss
from models.families.granite import Granite, GraniteHybrid, GraniteMoe
from models.families.hy_v3 import HYV3
from models.families.llama import Llama
from models.families.minimax_m2 import MiniMaxM2
from models.families.mistral import Mistral
from models.families.mixtral import Mixtral
from models.families.nemotron_h import NemotronH
from models.families.olmo3 import Olmo2, Olmo3
from models.families.phi3 import Phi3
from models.families.qwen2 import Qwen2
from models.families.qwen3 import Qwen3
from models.families.qwen3_5 import Qwen35
from models.families.qwen3_moe import Qwen3Moe
from models.families.qwen3_next import Qwen3Next
from models.families.seed_oss import SeedOss
from models.families.smollm3 import SmolLM3
from models.layers.decoder import Decoder

_LONGEST = 1000  # characters of keys in an error

ARCHITECTURES: dict[str, type[Decoder]] = {
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3,
    "Gemma4ForCausalLM": Gemma4,
    "Gemma4ForConditionalGeneration": Gemma4,
    "Gemma4UnifiedForCausalLM": Gemma4,
    "Gemma4UnifiedForConditionalGeneration": Gemma4,
    "GptOssForCausalLM": GptOss,
    "GraniteForCausalLM": Granite,
    "GraniteMoeForCausalLM": GraniteMoe,
    "GraniteMoeSharedForCausalLM": GraniteMoe,
    "GraniteMoeHybridForCausalLM": GraniteHybrid,
    "LlamaForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "MistralForCausalLM": Mistral,
    "MinistralForCausalLM": Mistral,
    "Ministral3ForCausalLM": Mistral,
    "Mistral3ForConditionalGeneration": Mistral,
    "MixtralForCausalLM": Mixtral,
    "Phi3ForCausalLM": Phi3,
    "SeedOssForCausalLM": SeedOss,
    "SmolLM3ForCausalLM": SmolLM3,
    "Olmo2ForCausalLM": Olmo2,
    "Olmo3ForCausalLM": Olmo3,
    "Ernie4_5ForCausalLM": Ernie45,
    "Ernie4_5_ForCausalLM": Ernie45,
    "Ernie4_5_MoeForCausalLM": Ernie45Moe,
    "GlmForCausalLM": Glm,
    "Glm4ForCausalLM": Glm4,
    "Glm4MoeForCausalLM": Glm4Moe,
    "HYV3ForCausalLM": HYV3,
    "MiniMaxM2ForCausalLM": MiniMaxM2,
    "NemotronHForCausalLM": NemotronH,
    "Qwen3NextForCausalLM": Qwen3Next,
    "Qwen3_5ForCausalLM": Qwen35,
    "Qwen3_5ForConditionalGeneration": Qwen35,
    "Qwen3_5MoeForCausalLM": Qwen35,
    "Qwen3_5MoeForConditionalGeneration": Qwen35,
}


def model_class(architecture: str, config: Mapping[str, Any] | None = None) -> type[Decoder]:
    """The class of an architecture. For any other name a ValueError that lists the known ones and, with the content of
    its ``config``, says which is nearest by name and which keys are not those of that one."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    hint = ""
    if config and (nearest := difflib.get_close_matches(architecture, ARCHITECTURES, 1, 0.0)):
        family = ARCHITECTURES[nearest[0]].family_config
        text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        differ = ", ".join(f"{key!r} {text[key]!r}" for key in differing_keys(text, family)) or "no keys"
        hint = f"the nearest by name, {nearest[0]}, differs in {differ[:_LONGEST]}; "
    raise ValueError(
        f"architecture {architecture!r} is not implemented; {hint}known architectures are {', '.join(ARCHITECTURES)}"
    )


def config_from_folder(folder: str | Path) -> ModelConfig:
    """Read ``folder``/config.json and, where it exists, generation_config.json. Raises ModelConfigError."""
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ModelConfigError(f"{folder} holds no config.json; {_what_to_type(folder)}")
    config = read_json_object(path)
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    try:
        eos = token_ids(generation, "eos_token_id")
    except ValueError as error:
        raise ModelConfigError(f"{generation_path}: {error}") from error
    text = config.get("text_config")
    named = [one.get(key) for one in (config, text) if isinstance(one, dict) for key in ("dtype", "torch_dtype")]
    if not any(named) and (stored := stored_dtype(folder)) in DTYPES.values():
        config["dtype"] = str(stored).removeprefix("torch.")
    if all(one.get("tie_word_embeddings") is None for one in (config, text) if isinstance(one, dict)):
        config["tie_word_embeddings"] = _stores_no_head(folder)
    exported = folder / "hf_quant_config.json"
    try:
        return config_from_dict(config, eos, read_json_object(exported) if exported.is_file() else None)
    except ValueError as error:
        raise ModelConfigError(f"{path}: {error}") from error


def config_from_dict(
    config: Mapping[str, Any], eos_token_ids: tuple[int, ...] = (), exported: Mapping[str, Any] | None = None
) -> ModelConfig:
    """From the parsed content of config.json, as its family reads it; otherwise as ``model_config``."""
    family = model_class(architecture_of(config), config).family_config
    return model_config(config, family, eos_token_ids, exported)


def _stores_no_head(folder: Path) -> bool | None:
    """Whether the head must be the embedding; None where the folder holds no readable weights."""
    try:
        return not any(name.endswith("lm_head.weight") for name in locate_tensors(folder))
    except WeightsError:
        return None


def _what_to_type(folder: Path) -> str:
    """For a folder, or a file, of another format."""
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        return "GGUF is not read: name the folder of the safetensors checkpoint that it was made from"
    if (folder / "params.json").is_file():
        return (
            "params.json, consolidated*.safetensors and tekken.json are Mistral's own format, which is not read: name "
            "a folder with config.json, model*.safetensors and tokenizer.json"
        )
    return "--model must be a folder as transformers' save_pretrained writes it"
