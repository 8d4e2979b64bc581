"""The formats of tool calls and of reasoning, by vLLM's names (`--tool-call-parser`, `--reasoning-parser`).

Knows: the formats there are. Does not know: how one is read, which one a model writes (detect.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from launch.serve.parsers.call_format import CallFormat
from launch.serve.parsers.deepseek import Deepseek
from launch.serve.parsers.gemma4 import Gemma4
from launch.serve.parsers.glm import Glm
from launch.serve.parsers.harmony import Harmony
from launch.serve.parsers.hermes import Hermes
from launch.serve.parsers.invoke import DeepseekV32, MinimaxM2
from launch.serve.parsers.kimi import Kimi
from launch.serve.parsers.llama import Llama3Json
from launch.serve.parsers.mistral import Mistral
from launch.serve.parsers.qwen3_coder import Qwen3Coder, SeedOss
from launch.serve.parsers.think import BRACKETS, CHANNEL, SEED, THINK

# The first name of several is the one that is logged.
CALLS: Final[Mapping[str, type[CallFormat]]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
    "glm45": Glm,
    "glm47": Glm,
    "minimax_m2": MinimaxM2,
    "mistral": Mistral,
    "openai": Harmony,
    "llama3_json": Llama3Json,
    "deepseek_v3": Deepseek,
    "deepseek_v31": Deepseek,
    "deepseek_v32": DeepseekV32,
    "kimi_k2": Kimi,
    "seed_oss": SeedOss,
    "gemma4": Gemma4,
}
HARMONY: Final = "openai_gptoss"
KEPT: Final = "minimax_m2_append_think"
# First and last mark; none for the format that is read together with calls.
REASONING: Final[Mapping[str, str]] = {
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3"), THINK),
    KEPT: THINK,
    "mistral": BRACKETS,
    "seed_oss": SEED,
    "gemma4": CHANNEL,
    HARMONY: "",
}
