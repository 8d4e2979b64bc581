"""What only sparse models do: experts and ranks, their load, and which options fit. Lives over them: test_lives.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models.expert_load import ExpertLoad
from models.layers.decoder import DecoderLayer
from models.layers.moe import SparseMLP
from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.chain_depth import agree_depth_and_horizon
from runtime.config import ConfigError, EngineConfig
from runtime.execute.executor import Executor
from tests.runtime.engine import rig
from tests.runtime.engine.rig import TINY, run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.runtime.engine.test_ranks import NGRAM, SEED, TREE, start, written_drafter

EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
}


@pytest.fixture(autouse=True, scope="module")
def tiny_models_have_experts() -> Iterator[None]:
    """The rig's tiny model, for all tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig, "TINY", TINY | EXPERTS)
        yield


def folder_of(folder: Path, shape: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | shape))
    return folder


@pytest.mark.parametrize("depth", [1, 4])
def test_mixtral_too(depth: int) -> None:
    requests = mixture(2)
    with rig.rig(depth=0, shape=MIXTRAL) as engine:
        serial = outcome(run(engine, requests))
    with rig.rig(depth=depth, shape=MIXTRAL) as engine:
        assert outcome(run(engine, requests)) == serial
        assert engine.counters["chained_steps"] == engine.counters["steps"] - 1


def test_no_expert_sees_what_masked_rows_hold() -> None:
    """NaN in blocks that nobody may read: ghost and padding rows carry it into the layers and reach no expert."""
    requests = mixture(11)
    with rig.rig() as engine:
        assert engine.executor._model.config.experts is not None
        clean = outcome(run(engine, requests))
    with rig.rig(blocks=60) as engine:
        assert outcome(run(engine, requests, lambda e, turn: fill_with_nan(e, idle_blocks(e)))) == clean


def engine_over(folder: Path, **options: Any) -> Any:
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        max_num_seqs=8,
        block_size=8,
        max_model_len=128,
        num_blocks=200,
        decode_buckets=(8,),
        **options,
    )
    return build_engine(config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu")


def test_load_is_reported_and_a_map_made_of_it_changes_no_token(tmp_path: Path) -> None:
    folder, report = folder_of(tmp_path / "model", EXPERTS), tmp_path / "load.json"
    requests = mixture(3)
    with engine_over(folder, expert_load=str(report)) as engine:
        found = outcome(run(engine, requests))
        counters = engine.counters
    load = ExpertLoad.read(report)
    assert list(load.tokens) == [1]
    computed = sum(len(r.prompt_token_ids) + len(found[r.request_id][0]) - 1 for r in requests)
    assert sum(load.tokens[1]) == 3 * (computed - counters["prefix_hit_tokens"])
    with engine_over(folder, expert_parallel=True, expert_map=str(report)) as engine:
        assert outcome(run(engine, requests)) == found


def test_what_a_start_up_times_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, report = folder_of(tmp_path / "model", EXPERTS), tmp_path / "load.json"

    def timing(config: EngineConfig, executor: Executor, *others: Any) -> tuple[int, int]:
        executor.device.zeros(4, dtype=torch.int64)
        for layer in executor.decode._parts.model.layers:
            if isinstance(layer, DecoderLayer) and isinstance(layer.mlp, SparseMLP):
                assert layer.mlp.load_E is not None
                layer.mlp.load_E.add_(7)
        return agree_depth_and_horizon(config, executor, *others)

    monkeypatch.setattr("runtime.build.agree_depth_and_horizon", timing)
    with engine_over(folder, expert_load=str(report)) as engine:
        assert engine.counters["device_allocs_after_warmup"] == 0
    assert set(ExpertLoad.read(report).tokens[1]) == {0}


def test_options_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    dense, sparse = folder_of(tmp_path / "dense", {}), folder_of(tmp_path / "sparse", EXPERTS)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts: leave out --expert-parallel"):
        engine_over(dense, expert_parallel=True)
    with pytest.raises(ConfigError, match=r"data_parallel is 2, but Qwen3.* has no experts.*start one job a replica"):
        engine_over(dense, data_parallel=2)
    with pytest.raises(ConfigError, match="type --expert-parallel, or leave out --expert-map"):
        engine_over(sparse, expert_map="load.json")
    report = tmp_path / "load.json"
    with pytest.raises(ConfigError, match=r"load\.json cannot be read"):
        engine_over(sparse, expert_map=str(report), expert_parallel=True)
    report.write_text('{"schema": 1, "architecture": "X", "layers": [{"layer": 0, "tokens": [1, 2]}]}')
    with pytest.raises(ConfigError, match=r"2 experts in 1 layers of X, but .* with 8 experts in 1 layers"):
        engine_over(sparse, expert_map=str(report), expert_parallel=True)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        pytest.param(2, {"expert_parallel": True}, marks=pytest.mark.long),
        pytest.param(2, {"expert_parallel": True, "speculative_config": NGRAM}, marks=pytest.mark.long),
        (2, {"expert_parallel": True, "speculative_config": {"method": "mtp", "disable_by_batch_size": 8, **TREE}}),
        (4, {"expert_parallel": True, "speculative_config": NGRAM}),
    ],
    ids=str,
)
def test_any_number_of_ranks_draws_the_same_tokens(world: int, options: dict[str, Any], tmp_path: Path) -> None:
    """A share of each expert on every rank, or whole experts; one token a row and step, or windows, or trees of
    a drafter with weights."""
    if (keys := options.get("speculative_config", NGRAM)) != NGRAM:
        options = options | {"speculative_config": keys | {"model": str(written_drafter(keys["method"], tmp_path))}}
    with rig.rig(depth=0) as engine:
        alone = outcome(run(engine, mixture(SEED)))
    ran = start(world, folder_of(tmp_path / "model", EXPERTS), tmp_path / "found.json", **options)
    assert ran.returncode == 0, ran.said[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"] == {str(i): [list(tokens), int(reason)] for i, (tokens, reason) in sorted(alone.items())}
    assert found["counters"]["chain_breaks{start}"] == 1
    assert bool(found["counters"]["spec_num_accepted_tokens"]) == ("speculative_config" in options)
