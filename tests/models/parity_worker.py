"""One rank of the parity test: run every saved model through every scenario, write what came out.

Started as ``torchrun ... -m tests.models.parity_worker FOLDER COUNT`` for the last COUNT scenarios; FOLDER/NAME holds a
model each, and prompts.json the prompts. Rank 0 writes
FOLDER/NAME.SPLIT.SIZE.safetensors with tokens and logits of each scenario, for every split that the model can have. All
ranks must have seen the same bits: of tokens, of logits, and of every routing decision.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from models.config import ModelConfig
from models.layers.decoder import Decoder
from models.registry import config_from_folder
from models.weights import load_model
from parallel.comm.collectives import Collectives, GroupCollectives
from parallel.layers.experts import ExpertSplit
from tests.models.kernels.paged_driver import PagedDriver
from tests.plant import Op, kernels_with

NEW_TOKENS = 3


class Scenario(NamedTuple):
    """``batch`` prompts at a time, as many of them as ``prompts``."""

    batch: int
    prompts: int
    chunk: int | None
    share_prefixes: bool

    @property
    def label(self) -> str:
        return f"batch{self.batch}-chunk{self.chunk}-share{self.share_prefixes}"


SCENARIOS = (  # the last one in every run of four ranks in threads
    Scenario(batch=1, prompts=2, chunk=None, share_prefixes=False),
    Scenario(batch=8, prompts=8, chunk=None, share_prefixes=True),
    Scenario(batch=5, prompts=5, chunk=4, share_prefixes=True),
    Scenario(batch=5, prompts=5, chunk=7, share_prefixes=False),
)


class RoutingRecorder:
    """Keeps every routing decision: weights, and the ids of the chosen experts on whichever rank they are."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.ids: list[Tensor] = []

    def route(self, route: Op, logits_TE: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        """Either router: each ends with local numbers, real tokens and, where it is counted, the load."""
        before, (local_E, real_T, *_) = given[:2], given[2:]
        all_E = torch.arange(len(local_E), dtype=torch.int32)  # the shared ones behind the others included
        weights_TC, ids_TC = route(logits_TE, *before, all_E, real_T)
        self.weights.append(weights_TC)
        self.ids.append(ids_TC)
        routed: tuple[Tensor, Tensor] = route(logits_TE, *given)
        return routed


def splits_of(config: ModelConfig, size: int) -> dict[str, ExpertSplit]:
    """tp: a share of every matrix. ep: whole experts. map: whole experts in another order in every layer. A single rank
    has all experts either way."""
    if config.experts is None or size == 1:
        return {"tp": ExpertSplit()}
    draw = random.Random(3)
    experts = range(config.experts.count)
    orders = {layer: tuple(draw.sample(experts, len(experts))) for layer in config.experts.layers}
    return {"tp": ExpertSplit(), "ep": ExpertSplit(whole=True), "map": ExpertSplit(whole=True, orders=orders)}


def run_models(
    folder: Path, collectives: Collectives, count: int = len(SCENARIOS), *, every_split: bool = True
) -> None:
    """Every model folder, with every split or, of three models in a row, each with another one."""
    for number, model_folder in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        config = config_from_folder(model_folder)
        splits = list(splits_of(config, collectives.size).items())
        for name, split in splits if every_split else [splits[number % len(splits)]]:
            recorder = RoutingRecorder()
            kernels = kernels_with(route_top_k=recorder.route, route_sigmoid=recorder.route)
            model = load_model(config, model_folder, collectives=collectives, kernels=kernels, experts=split)
            results = run_scenarios(folder, model, SCENARIOS[-count:])
            routing = {
                "weights": torch.cat([w.flatten() for w in recorder.weights] or [torch.zeros(1)]),
                "ids": torch.cat([i.flatten() for i in recorder.ids] or [torch.zeros(1)]),
            }
            for label, result in {**results, **routing}.items():
                _require_equal(label, result, collectives)
            if collectives.rank == 0:
                save_file(results, folder / f"{model_folder.name}.{name}.{collectives.size}.safetensors")


def run_scenarios(folder: Path, model: Decoder, scenarios: Sequence[Scenario]) -> dict[str, Tensor]:
    """Tokens and logits by label."""
    prompts: list[list[int]] = json.loads((folder / "prompts.json").read_text())
    driver = PagedDriver(model, pages=200)
    results: dict[str, Tensor] = {}
    for scenario in scenarios:
        rows = []
        for start in range(0, scenario.prompts, scenario.batch):
            batch = [
                [token % model.config.vocab_size for token in prompt]
                for prompt in prompts[start : start + scenario.batch]
            ]
            rows += driver.generate(batch, NEW_TOKENS, scenario.chunk, scenario.share_prefixes)
        results[f"{scenario.label}.tokens"] = torch.tensor([row.tokens[-NEW_TOKENS:] for row in rows])
        results[f"{scenario.label}.logits"] = torch.stack([torch.stack(row.logits) for row in rows])
    return results


def _require_equal(name: str, result: Tensor, collectives: Collectives) -> None:
    """Every rank must have seen the same bits."""
    everyone = collectives.all_gather(result.flatten().view(torch.int32).clone()).view(collectives.size, -1)
    if not torch.equal(everyone, everyone[:1].expand_as(everyone)):
        raise RuntimeError(f"{name} differs between ranks")


def main(folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group")
    collectives = GroupCollectives(group)
    assert (
        collectives.broadcast_text(lambda: f"the choice of rank {collectives.rank}: größer")
        == "the choice of rank 0: größer"
    )
    assert collectives.broadcast_text(str) == ""
    run_models(folder, collectives, count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
