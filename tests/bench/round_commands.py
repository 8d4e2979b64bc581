"""Commands that time rounds of speculation, of Qwen3-8B's shape and one of 32B's, and plain steps to compare with.

Knows: the drafters, how many guesses a script keeps of each, the contexts (docs/lab/measurements/speculation.md).
Does not know: how many GPUs run a command, or when (measure.py).
"""

from __future__ import annotations

import json
from typing import Any

_SHORT = "--input-len 1024 --batch-size 1,8,32 --decode-buckets 1,8,32 --max-num-seqs 32 --max-model-len 8192"
_ALONE = "--batch-size 1 --decode-buckets 1 --max-num-seqs 1"
_OPTIONS = {
    "": f"{_SHORT} --num-iters 2",
    "-16k": f"{_ALONE} --input-len 16000 --max-model-len 33000 --num-iters 1 --no-prefix-caching",
    "-32k": f"{_ALONE} --input-len 32000 --max-model-len 33000 --num-iters 1 --no-prefix-caching",
}
_ONE_ROW = f"{_ALONE} --input-len 1024 --max-model-len 8192 --num-iters 2"  # what is verified at once is many tokens


def _drafted(method: str, guesses: int, tokens: float, model: str = "qwen3-8b", **more: Any) -> dict[str, Any]:
    """``tokens``: what a round gains by the script, the bonus token included."""
    return {
        "method": method,
        "model": f"models/shapes/{model}/{method}",
        "num_speculative_tokens": guesses,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": tokens,
        "disable_by_batch_size": 256,
        **more,
    }


_KINDS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "dflash": _drafted("dflash", 15, 6.5),
    "block-4": _drafted("dflash", 3, 2.8),
    "tree": _drafted("dflash", 15, 6.5, tree_size=32),
    "mtp": _drafted("mtp", 3, 2.8),
    "mtp-ids": _drafted("mtp", 3, 2.8, token_map=32768),
    "mtp-4": _drafted("mtp", 4, 3.2),
}


def round_commands() -> dict[str, str]:
    """Name -> what ``python -m launch bench latency`` is given, in the order of what is wanted most."""
    found = {}
    for context, options in _OPTIONS.items():
        for kind, config in _KINDS.items():
            length = 385 if kind in ("dflash", "tree") else 257
            given = _ONE_ROW if kind == "tree" and not context else options
            found[f"rounds-{kind}{context}"] = _command(
                "qwen3-8b", f"{given} --output-len {129 if config is None or context else length}", config
            )
    for kind, config in (("plain", None), ("dflash", _drafted("dflash", 15, 6.5, "qwen3-32b"))):
        options = f"{_OPTIONS['']} --output-len {129 if config is None else 385}"
        found[f"rounds-{kind}-32b"] = _command("qwen3-32b", options, config)
    return found


def _command(model: str, options: str, config: dict[str, Any] | None) -> str:
    words = f"--model {model} --load-format dummy --prefill-attention triton --num-warmups 1 {options}"
    return words if config is None else f"{words} --speculative-config '{json.dumps(config)}'"
