"""Which drafters a start refuses before anything is loaded, and drafters without weights under scripted acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.config import ModelConfig, ModelConfigError
from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.speculate.methods import check_drafter, proposer_for
from runtime.speculative_config import SpeculativeConfigError, speculative_config
from tests.models.drafters.tiny_drafters import write
from tests.runtime.engine.rig import request, rig, run, tiny_folder
from tests.runtime.speculate.recorded import DFLASH, MTP, SHAPE

SHAPES = Path("models/shapes")
EIGHT_B = SHAPES / "qwen3-8b"


def asking(method: str, model: Path, tokens: int = 3, **keys: Any) -> dict[str, Any]:
    return {"method": method, "model": str(model), "num_speculative_tokens": tokens, **keys}


@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_a_start_refuses_the_drafter_of_another_target(method: str, tmp_path: Path) -> None:
    """Both values, the file, and what to use instead; no weights are looked for."""
    folder = write(tmp_path / "drafter", DFLASH if method == "dflash" else MTP, {})
    (folder / "model.safetensors").unlink()
    config = EngineConfig(
        model=str(tiny_folder(tmp_path / "target")),
        load_format="dummy",
        device="cpu",
        speculative_config=asking(method, folder),
    )
    with pytest.raises(
        ModelConfigError, match=rf"config\.json.*hidden_size.* {SHAPE['hidden_size']}, .* 48, .*made for"
    ):
        build_engine(config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu")


def test_more_guesses_than_a_block_has_are_refused() -> None:
    target = ModelConfig.from_folder(EIGHT_B)
    check_drafter(speculative_config(asking("dflash", EIGHT_B / "dflash", 15)), target)
    with pytest.raises(SpeculativeConfigError, match=r"is 16, but .* 16 tokens.*type \"num_speculative_tokens\": 15"):
        check_drafter(speculative_config(asking("dflash", EIGHT_B / "dflash", 16)), target)
    check_drafter(speculative_config(asking("mtp", EIGHT_B / "mtp", 16)), target)


@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_methods_with_weights_ask_for_a_folder(method: str) -> None:
    with pytest.raises(SpeculativeConfigError, match=rf'type "model": "models/demo/{method}"'):
        speculative_config({"method": method, "num_speculative_tokens": 3})
    with pytest.raises(ModelConfigError, match=r"holds no config\.json"):
        check_drafter(speculative_config(asking(method, SHAPES)), ModelConfig.from_folder(EIGHT_B))


@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_scripted_acceptance_over_a_drafter_without_weights(method: str, tmp_path: Path) -> None:
    """What a bench measures: the drafter computes, the script decides. Every round keeps two guesses of three here."""
    (tmp_path / "config.json").write_text(json.dumps(DFLASH if method == "dflash" else MTP), encoding="utf-8")
    keys = asking(method, tmp_path, rejection_sample_method="synthetic", synthetic_acceptance_length=3)
    proposer = proposer_for(speculative_config(keys), load_format="dummy", seed=1)
    requests = [request(i, range(1, 6 + i), max_tokens=31, stops=()) for i in range(3)]
    with rig(depth=2, widths=(4,), proposer=proposer, shape=SHAPE, max_model_len=64) as engine:
        finished = run(engine, requests)
        engine.stop()
        counters = dict(engine.counters)
    assert all(len(one.token_ids) == 31 for one in finished.values())
    assert counters["spec_num_drafts"] == 3 * 10
    assert counters["spec_num_accepted_tokens"] == 3 * 20
