"""Write golden.json: what transformers generates, in float32 on a CPU, for the greedy prompts of prompts.jsonl.

    python -m tests.models.demo_golden                       # of models/demo
    python -m tests.models.demo_golden models/demo/hybrid    # of the hybrid: the same prompts, its own weights

Knows: transformers (a development dependency) as the oracle an engine is compared with. Stop strings are not applied:
a row ends at an eos id, at the prompt's ``max_tokens`` or at MAX_TOKENS, whichever comes first.
Does not know: any engine of ours.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "models" / "demo"
MAX_TOKENS = 64


def load(folder: Path) -> tuple[Any, Any]:
    """transformers' model (float32, CPU) and tokenizer of a model folder; no code of the folder is run."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds, and tests read FOLDER alone

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def read_prompts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def golden_row(model: Any, tokenizer: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """One prompt's greedy continuation (its eos id included) and ``margin``: the smallest lead, over all steps, of the
    chosen token's logit over the runner-up's. An engine whose logits err by less than half of it must agree.
    """
    ids = torch.tensor([tokenizer.encode(prompt["prompt"])])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=min(MAX_TOKENS, prompt["max_tokens"]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    token_ids = result.sequences[0, ids.shape[1] :].tolist()
    best = torch.stack([logits[0] for logits in result.logits]).topk(2).values
    stopped = token_ids[-1] in model.generation_config.eos_token_id
    return {
        "id": prompt["id"],
        "prompt_token_ids": ids[0].tolist(),
        "token_ids": token_ids,
        "finish_reason": "stop" if stopped else "length",
        "margin": round((best[:, 0] - best[:, 1]).min().item(), 4),
    }


def main() -> None:
    what = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.models.demo_golden", description=what)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="model folder (default: models/demo)")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    model, tokenizer = load(folder)
    rows = [golden_row(model, tokenizer, prompt) for prompt in read_prompts(FOLDER) if prompt["temperature"] == 0]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    (folder / "golden.json").write_text(f'{{"max_tokens": {MAX_TOKENS}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
