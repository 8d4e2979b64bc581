"""Families with something of their own between projections and attention, or in their MTP layer, in engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from tests.models.tiny_checkpoint import TINY
from tests.models.tiny_families import FAMILIES
from tests.runtime.engine.rig import request, run

MTP = {"method": "mtp", "num_speculative_tokens": 2}


def answers(folder: Path, family: str, **options: Any) -> dict[int, tuple[int, ...]]:
    """Prompts in chunks of 8 tokens beside rows that decode."""
    (folder / "config.json").write_text(json.dumps(TINY | FAMILIES[family]))
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_prefill_tokens=8,
        num_blocks=64,
        bundles=str(folder / "bundles"),
        **options,
    )
    asked = [request(i, range(3 + i, 9 + 4 * i), max_tokens=12, stops=()) for i in range(5)]
    with build_engine(
        config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
    ) as engine:
        return {i: tuple(one.token_ids) for i, one in run(engine, asked).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["glm", "minimax", "ministral3", "smollm3", "olmo3", "granite-4", "gemma4", "gemma4-experts"]
)
def test_tokens_are_the_serial_engines(family: str, tmp_path: Path) -> None:
    expected = answers(tmp_path, family, chain_depth=0)
    assert answers(tmp_path, family, chain_depth=2) == expected
    if family == "glm":
        assert answers(tmp_path, family, chain_depth=2, speculative_config=MTP) == expected
