"""How many greedy tokens of the demo model differ by FP8, each asked for behind the right ones before it.

    python -m tests.models.fp8_rates                    # on a CPU
    python -m tests.models.fp8_rates --device cuda:0    # by the kernels of a GPU

Rates of a setting: of a GPU's kernels against plain torch in bfloat16 that quantises alike, of bfloat16 against float32
that does, and of that against the model in float32 (what quantisation itself costs).

Knows: settings, and bounds of the first. Does not know: how anything is quantised.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.schedule.request import Request, SamplingParams
from tests.models.demo_golden import FOLDER
from tests.runtime.engine.prompt_ranks import Scores
from tests.runtime.engine.rig import run

WEIGHTS: dict[str, Any] = {"quantization": "fp8", "fp8_activations": "never"}
CACHE: dict[str, Any] = {**WEIGHTS, "kv_cache_dtype": "fp8"}
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {  # options, the most tokens of 100 that may differ
    "weights": (WEIGHTS, 0.3),
    "weights, cache": (CACHE, 1.5),
    "weights, cache, activations": ({**CACHE, "fp8_activations": "always"}, 4.0),
}


def likeliest(device: str, dtype: str, options: dict[str, Any]) -> list[int]:
    """The model's token at every place of the golden answers, each after the golden tokens before it."""
    rows = json.loads((FOLDER / "golden.json").read_text())["rows"]
    config = EngineConfig(
        model=str(FOLDER),
        device="cuda" if device.startswith("cuda") else "cpu",
        dtype=dtype,  # type: ignore[arg-type]
        max_num_seqs=16,
        max_model_len=640,
        num_blocks=256,
        prefix_caching=False,
        **options,
    )
    asked, scores = [], Scores()
    for number, row in enumerate(rows):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=1)
        asked.append(Request(number, (*row["prompt_token_ids"], *row["token_ids"]), sampling, ()))
    with build_engine(
        config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device=device
    ) as engine:
        run(engine, asked, watch=scores)
    found = []
    for number, row in enumerate(rows):
        first = len(row["prompt_token_ids"])
        found += [scores.by_request[number][first + at][2][0] for at in range(len(row["token_ids"]))]
    return found


def differing(found: Sequence[int], expected: Sequence[int]) -> float:
    """Of 100 tokens."""
    return 100 * sum(a != b for a, b in zip(found, expected, strict=True)) / len(expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    plain = likeliest("cpu", "float32", {})
    print(f"{len(plain)} tokens; not quantised: bfloat16 {differing(likeliest(device, 'bfloat16', {}), plain):.2f}%")
    for name, (options, most) in SETTINGS.items():
        found, exact = likeliest(device, "bfloat16", options), likeliest("cpu", "float32", options)
        told = f"bfloat16 {differing(found, exact):.2f}%, quantisation itself {differing(exact, plain):.2f}%"
        if device != "cpu":
            kernels = differing(found, likeliest("cpu", "bfloat16", options))
            told = f"kernels {kernels:.2f}% of at most {most}%{' EXCEEDED' * (kernels > most)}, {told}"
        print(f"{name}: {told}", flush=True)


if __name__ == "__main__":
    main()
