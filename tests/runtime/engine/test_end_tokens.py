"""What ends an answer by default: the ids of config.json or generation_config.json, and the tokenizer's end token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from tests.runtime.engine.rig import tiny_folder


@pytest.mark.parametrize(("of_config", "expected"), [(None, (5,)), (5, (5,)), ([7, 9], (7, 9, 5))])
def test_the_tokenizer_s_end_token_ends_answers(tmp_path: Path, of_config: object, expected: tuple[int, ...]) -> None:
    folder = tiny_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": of_config}))
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 5, "content": "<e>"}]}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<e>"}}')
    engine_config = EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", max_num_seqs=1, num_blocks=40, max_model_len=64
    )
    control = SingleRankControl()
    with build_engine(engine_config, control=control, collectives=SingleRank(), agree_min=int, device="cpu") as engine:
        assert engine.model_config.eos_token_ids == expected
