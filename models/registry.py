"""Which class serves which architecture name of config.json.

Knows: the list. Does not know: anything about the models on it.
"""

from __future__ import annotations

from models.families.llama import Llama
from models.families.mistral import Mistral
from models.families.mixtral import Mixtral
from models.families.nemotron_h import NemotronH
from models.families.qwen2 import Qwen2
from models.families.qwen3 import Qwen3
from models.families.qwen3_5 import Qwen35
from models.families.qwen3_moe import Qwen3Moe
from models.families.qwen3_next import Qwen3Next
from models.layers.decoder import Decoder

ARCHITECTURES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "NemotronHForCausalLM": NemotronH,
    "Qwen3NextForCausalLM": Qwen3Next,
    "Qwen3_5ForCausalLM": Qwen35,
    "Qwen3_5ForConditionalGeneration": Qwen35,
    "Qwen3_5MoeForCausalLM": Qwen35,
    "Qwen3_5MoeForConditionalGeneration": Qwen35,
}


def model_class(architecture: str) -> type[Decoder]:
    """The class of an architecture; ValueError, listing the known ones, for any other name."""
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not implemented; known architectures are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]
