"""How many guesses of the demo models' drafters their greedy answers keep: the record in models/demo/acceptance.json.

    python -m tests.runtime.speculate.demo_acceptance    # writes it anew, after a change of drafters, model or prompts

Knows: the prompts of golden.json, the hybrid beside the demo model (whose MTP layer is in its own checkpoint), and the
engine as build.py makes it, in float32 on a CPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.schedule.plan import Finished
from runtime.schedule.request import Request, SamplingParams
from tests.runtime.engine.rig import run

DEMO = Path("models/demo")
HYBRID = DEMO / "hybrid"
RECORD = DEMO / "acceptance.json"
WIDEST = {"mtp": 3, "dflash": 7}  # num_speculative_tokens
TREE_SIZES = {"mtp": 16, "dflash": 32}  # tokens of a tree around as many


def golden_rows(folder: Path = DEMO) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "golden.json").read_text(encoding="utf-8"))["rows"]
    return rows


def serve(
    method: str | None, depth: int = 2, *, tree_size: int | None = None, folder: Path = DEMO
) -> tuple[dict[int, Finished], dict[str, int | float]]:
    """The golden prompts' answers, and the engine's counters; without speculation where ``method`` is None."""
    torch.set_num_threads(1)
    config = EngineConfig(model=str(folder), device="cpu", max_num_seqs=16, max_model_len=640, chain_depth=depth)
    if method is not None:
        keys = {"method": method, "num_speculative_tokens": WIDEST[method], "tree_size": tree_size}
        if folder == DEMO:
            keys["model"] = str(DEMO / method)
        config = replace(config, speculative_config={**keys, "disable_by_batch_size": 16})
    requests = []
    for i, row in enumerate(golden_rows(folder)):
        sampling = SamplingParams(max_tokens=len(row["token_ids"]), temperature=0.0, seed=i)
        requests.append(Request(i, tuple(row["prompt_token_ids"]), sampling, (0, 3)))
    with build_engine(
        config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
    ) as engine:
        finished = run(engine, requests)
        engine.stop()
        return finished, dict(engine.counters)


def acceptance(method: str, counters: dict[str, int | float]) -> dict[str, Any]:
    """Of all rounds: the share that kept the first, the first two, ... guesses, and tokens a round."""
    rounds = counters["spec_num_drafts"]
    kept = [counters[f"spec_accepted_per_position{{{place}}}"] for place in range(WIDEST[method])]
    return {
        "num_speculative_tokens": WIDEST[method],
        "rounds": rounds,
        "accepted_by_position": [round(count / rounds, 4) for count in kept],
        "accepted_length": round(1 + sum(kept) / rounds, 4),
    }


def tree_acceptance(method: str, counters: dict[str, int | float]) -> dict[str, Any]:
    """``acceptance`` of trees of TREE_SIZES."""
    return {"tree_size": TREE_SIZES[method], **acceptance(method, counters)}


def main() -> None:
    record = {method: acceptance(method, serve(method)[1]) for method in WIDEST}
    for method, size in TREE_SIZES.items():
        record[f"{method} tree"] = tree_acceptance(method, serve(method, tree_size=size)[1])
    record["hybrid mtp"] = acceptance("mtp", serve("mtp", folder=HYBRID)[1])
    tree = serve("mtp", tree_size=TREE_SIZES["mtp"], folder=HYBRID)
    record["hybrid mtp tree"] = tree_acceptance("mtp", tree[1])
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
