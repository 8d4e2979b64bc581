"""Prompts to score, what came of them, and one rank of an engine that does it:
``torchrun ... -m tests.runtime.engine.prompt_ranks FOLDER OUTPUT`` writes the leader's scores as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import torch

from launch.ranks.process_group import joined
from launch.ranks.rendezvous import discover
from launch.ranks.start_engine import open_engine
from runtime.config import EngineConfig
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import Request
from tests.runtime.engine.rig import VOCABULARY, request, run

Score = tuple[float, int, list[int], list[float]]  # chosen, rank, top ids, top values
TOP = (0, 3, 20, None, 1, 5)  # of request 0, 1, ...


def prompts(seed: int = 0) -> list[Request]:
    """Short and long prompts, one of a single token, one that nobody wants to know about."""
    draw = random.Random(seed)
    requests = []
    for request_id, length in enumerate((9, 40, 1, 25, 2, 64)):
        tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
        requests.append(request(request_id, tokens, max_tokens=6, prompt_logprobs=TOP[request_id]))
    return requests


class Scores:
    """Collects by request and position; a position that is reported twice is an error."""

    def __init__(self) -> None:
        self.by_request: dict[int, dict[int, Score]] = {}

    def __call__(self, output: StepOutput) -> None:
        if output.prompt_logprobs is None:
            return
        for request_id, part in zip(output.request_ids, output.prompt_logprobs, strict=True):
            if part is None or request_id < 0:
                continue
            known = self.by_request.setdefault(request_id, {})
            for i, chosen in enumerate(part.chosen_S.tolist()):
                position = part.start + i
                assert position not in known, f"request {request_id}, position {position} is reported twice"
                top = part.top_ids_SN[i].tolist(), part.top_SN[i].tolist()
                known[position] = (chosen, int(part.rank_S[i]), *top)


def main(folder: str, output: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = discover(os.environ)
    topology = rendezvous.topology
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        device="cpu",
        tensor_parallel=topology.world,
        max_num_seqs=8,
        block_size=8,
        max_model_len=128,
        num_blocks=200,
        max_prefill_tokens=24,
        decode_buckets=(8,),
    )
    with joined(rendezvous, "cpu"), open_engine(config, rendezvous) as engine:
        if not topology.is_leader:
            engine.follow()
            return
        scores = Scores()
        run(engine, prompts(), watch=scores)
        engine.stop()
        output.write_text(json.dumps(scores.by_request))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
