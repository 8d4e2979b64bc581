"""ERNIE 4.5 (Baidu 2025), dense: Llama rotated in pairs of neighbours.

Knows: its config. Does not know: layers and checkpoint names (llama.py).
Reference: Ernie4_5ForCausalLM of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.config_reader import ConfigReader
from models.families.llama import Llama


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), ConfigReader(config).flag("use_bias"))
    return {"rope_interleaved": True, **biases}


class Ernie45(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1e-5, theta=5e5, head_dim=128, kv_heads=2, tied=True, reads="use_bias", more=_more
    )
