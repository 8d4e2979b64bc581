"""Engines against transformers: every family of tests/models/test_parity.py, prompts up to 700 tokens, 64 tokens each.

One rank and two, in threads; chain depths 0 to 2, prompts whole and in chunks beside rows that decode, plain and with
draft tokens: in float32 each token is transformers' own choice, or as good as that. The products of one family take up
to two minutes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.schedule.plan import Finished
from runtime.schedule.request import Request
from tests.models.test_parity import MODELS, _save
from tests.runtime.engine.rig import request, run
from tests.runtime.engine.tensor_ranks import Meeting, MetCollectives, MetControl

NEW = 64
LENGTHS = (1, 2, 9, 70, 300, 700)
AS_GOOD = 1e-3  # between two logits, which float32 sums in other orders may exchange; logits spread by about 1
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_chooses_what_transformers_does(name: str, ranks: int, tmp_path: Path) -> None:
    family, settings = MODELS[name]
    model = _save(tmp_path, family, settings | {"max_position_embeddings": 1024})
    draw, vocabulary = random.Random(name), model.config.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-1][:650] + prompts[1])  # begins with cached blocks
    known: dict[tuple[int, ...], None] = {}
    for depth, chunk, drafts in product((0, 1, 2), (48, 1024), (None, NGRAM)):
        options: dict[str, Any] = {} if drafts is None else {"speculative_config": drafts}
        config = EngineConfig(
            model=str(tmp_path),
            device="cpu",
            dtype="float32",
            tensor_parallel=ranks,
            max_num_seqs=4,
            max_prefill_tokens=chunk,
            num_blocks=400,
            chain_depth=depth,
            bundles=str(tmp_path / "bundles"),
            **options,
        )
        asked = [request(i, prompt, max_tokens=NEW, stops=()) for i, prompt in enumerate(prompts)]
        found = _answers(config, ranks, asked)
        for i, prompt in enumerate(prompts):
            tokens = found[i].token_ids
            assert len(tokens) == NEW
            known.setdefault((*prompt, *tokens))
            if len(known) > len(prompts) * 4:
                raise AssertionError("hardly two engines agree")
    with torch.inference_mode():
        for whole in known:
            logits = model(torch.tensor([whole[:-1]]), use_cache=False).logits[0, -NEW:]
            chosen = logits.gather(1, torch.tensor(whole[-NEW:])[:, None])[:, 0]
            assert float((logits.amax(-1) - chosen).max()) <= AS_GOOD, (name, len(whole) - NEW)


def _answers(config: EngineConfig, ranks: int, asked: Sequence[Request]) -> dict[int, Finished]:
    """What rank 0 returns."""
    if ranks == 1:
        with build_engine(
            config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
        ) as engine:
            return run(engine, asked)
    devices, hosts = Meeting(ranks), Meeting(ranks)

    def live(rank: int) -> dict[int, Finished]:
        control, collectives = MetControl(hosts, rank, 0), MetCollectives(devices, rank)
        try:
            with build_engine(
                config,
                control=control,
                collectives=collectives,
                agree_min=lambda number: min(hosts.everyones(rank, number)),
                device="cpu",
            ) as engine:
                if rank:
                    engine.follow()
                    return {}
                found = run(engine, asked)
                engine.stop()
                return found
        except BaseException:
            devices.barrier.abort()  # or the other rank would wait for this one
            hosts.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        found, *_ = threads.map(live, range(ranks))
        return found
