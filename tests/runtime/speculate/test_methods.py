"""Which drafters a start refuses before anything is loaded, and drafters without weights under scripted acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import torch

from models.config import ModelConfigError
from models.registry import config_from_folder
from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import ConfigError, EngineConfig
from runtime.engine import Engine
from runtime.speculate.methods import check_drafter, proposer_for
from runtime.speculative_config import SpeculativeConfigError, speculative_config
from tests.models.drafters.tiny_drafters import eagle3_config, write
from tests.models.tiny_delta import FAMILIES
from tests.plant import plant
from tests.runtime.engine.rig import TINY, request, rig, run, tiny_folder
from tests.runtime.speculate.recorded import DFLASH, MTP, SHAPE, SIZES

SHAPES = Path("models/shapes")
EIGHT_B = SHAPES / "qwen3-8b"
DEMO = Path("models/demo")


def asking(method: str, model: Path, tokens: int = 3, **keys: Any) -> dict[str, Any]:
    return {"method": method, "model": str(model), "num_speculative_tokens": tokens, **keys}


@pytest.mark.parametrize("method", ["dflash", "mtp", "eagle3"])
def test_a_start_refuses_the_drafter_of_another_target(method: str, tmp_path: Path) -> None:
    """Both values, the file, and what to use instead; no weights are looked for."""
    own = {"dflash": DFLASH, "mtp": MTP, "eagle3": eagle3_config(**SIZES)}[method]
    folder = write(tmp_path / "drafter", own, {})
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
    target = config_from_folder(EIGHT_B)
    check_drafter(speculative_config(asking("dflash", EIGHT_B / "dflash", 15)), target)
    with pytest.raises(SpeculativeConfigError, match=r"is 16, but .* 16 tokens.*type \"num_speculative_tokens\": 15"):
        check_drafter(speculative_config(asking("dflash", EIGHT_B / "dflash", 16)), target)
    check_drafter(speculative_config(asking("mtp", EIGHT_B / "mtp", 16)), target)


def test_drafters_in_shapes_are_those_of_their_targets() -> None:
    drafters = [path.parent for path in sorted(SHAPES.glob("*/*/config.json"))]
    assert SHAPES / "qwen3.5-27b/dflash" in drafters
    for folder in drafters:
        check_drafter(speculative_config(asking(folder.name, folder)), config_from_folder(folder.parent))


@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_methods_with_weights_ask_for_a_folder(method: str) -> None:
    if method == "dflash":
        with pytest.raises(SpeculativeConfigError, match='type "model": "models/demo/dflash"'):
            speculative_config({"method": method, "num_speculative_tokens": 3})
    with pytest.raises(ModelConfigError, match=r"holds no config\.json"):
        check_drafter(speculative_config(asking(method, SHAPES)), config_from_folder(EIGHT_B))


@pytest.mark.parametrize(
    ("token_map", "said"),
    [
        (151937, r'first 151937 ids, but .* has 151936: type "token_map": 151936 or less'),
        ("no/ids.json", r"token_map no/ids\.json cannot be read"),
    ],
)
@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_ids_that_the_target_has_not_are_refused_at_the_start(method: str, token_map: Any, said: str) -> None:
    target = config_from_folder(EIGHT_B)
    check_drafter(speculative_config(asking(method, EIGHT_B / method, token_map=32768)), target)
    with pytest.raises(SpeculativeConfigError, match=said):
        check_drafter(speculative_config(asking(method, EIGHT_B / method, token_map=token_map)), target)


def test_trees_with_more_tokens_a_place_than_draft_ids_are_refused_at_the_start(tmp_path: Path) -> None:
    """Named by an option, by a drafter's config.json, or by its map alone."""
    target, tree = config_from_folder(EIGHT_B), {"tree_size": 9, "tree_top_k": 5}
    check_drafter(speculative_config(asking("mtp", EIGHT_B / "mtp", token_map=5, **tree)), target)
    said = 'tree_top_k is 5, but the drafter guesses among 4 ids: type "tree_top_k": 4 or less'
    with pytest.raises(SpeculativeConfigError, match=said):
        check_drafter(speculative_config(asking("mtp", EIGHT_B / "mtp", token_map=4, **tree)), target)
    with pytest.raises(SpeculativeConfigError, match=said):
        check_drafter(speculative_config({**OWN, "token_map": 4, **tree}), target)
    config = json.loads((EIGHT_B / "mtp" / "config.json").read_text())
    asked = speculative_config(asking("mtp", write(tmp_path, {**config, "draft_vocab_size": 4}, {}), **tree))
    with pytest.raises(SpeculativeConfigError, match=said):
        check_drafter(asked, target, load_format="dummy")
    write(tmp_path, config, {"d2t": torch.arange(4)})
    with pytest.raises(SpeculativeConfigError, match=said):
        check_drafter(asked, target)


LoadFormat = Literal["safetensors", "dummy"]
OWN = {"method": "mtp", "num_speculative_tokens": 3}
NEXT = {**TINY, **FAMILIES["qwen3-next"]}
PLAIN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    **dict.fromkeys(FAMILIES["qwen3-next"].keys() - TINY.keys()),
}
SAFETENSORS: Final = "safetensors"
DUMMY: Final = "dummy"


@pytest.mark.parametrize(
    ("shape", "tensors", "load_format", "message"),
    [
        ({}, ["model.norm.weight"], SAFETENSORS, r"holds no MTP layer: none .* named mtp\.\*.*\"model\": the folder"),
        (
            {},
            ["mtp.layers.0.mlp.gate.weight", "mtp.layers.1.mlp.gate.weight"],
            SAFETENSORS,
            r"holds 2 MTP layers \(mtp\.layers\.0, 1\).*only MTP of one layer",
        ),
        ({}, [], DUMMY, 'put "mtp_num_hidden_layers": 1 there'),
        ({"mtp_num_hidden_layers": 0}, [], DUMMY, 'put "mtp_num_hidden_layers": 1 there'),
        ({"mtp_num_hidden_layers": 2}, [], DUMMY, r"has 2 MTP layers.*only MTP of one layer"),
        ({"num_nextn_predict_layers": 3}, ["mtp.norm.weight"], SAFETENSORS, r"has 3 MTP layers"),
        (
            {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True},
            [],
            DUMMY,
            r"'mtp_use_dedicated_embeddings' is true",
        ),
        (
            PLAIN | {"architectures": ["LlamaForCausalLM"]},
            ["mtp.norm.weight"],
            SAFETENSORS,
            r"an MTP layer of LlamaForCausalLM itself is not implemented",
        ),
        (PLAIN, ["mtp.norm.weight"], SAFETENSORS, r"holds no MTP layer: none .* named model\.layers\.\d+\.\*"),
    ],
)
def test_targets_without_a_layer_of_their_own_are_refused(
    shape: dict[str, Any],
    tensors: list[str],
    load_format: LoadFormat,
    message: str,
    tmp_path: Path,
) -> None:
    """At the start of an engine, before anything is loaded, with what to type."""
    folder = write(tmp_path, NEXT | shape, {name: torch.zeros(1) for name in tensors})
    config = EngineConfig(model=str(folder), load_format=load_format, device="cpu", speculative_config=OWN)
    with pytest.raises(SpeculativeConfigError, match=message) as error:
        build_engine(config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu")
    assert '"method": "ngram"' in str(error.value), "what to type"


@pytest.mark.parametrize(("family", "tree"), [*((family, 0) for family in FAMILIES), ("qwen3-next", 12)])
def test_scripted_acceptance_over_a_targets_own_layer_without_weights(family: str, tree: int) -> None:
    keys = {**OWN, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    keys |= {"tree_size": tree, "tree_top_k": 5} if tree else {}
    proposer = proposer_for(speculative_config(keys), load_format="dummy", seed=1)
    requests = [request(i, range(1, 6 + i), max_tokens=31, stops=()) for i in range(3)]
    shape = {**FAMILIES[family], "mtp_num_hidden_layers": 1}
    with rig(depth=2, widths=(4,), proposer=proposer, shape=shape, max_model_len=64, tree=tree) as engine:
        finished = run(engine, requests)
        engine.stop()
        counters = dict(engine.counters)
    assert all(len(one.token_ids) == 31 for one in finished.values())
    assert counters["spec_num_accepted_tokens"] == 2 * counters["spec_num_drafts"] == 3 * 20


def test_an_engine_is_built_over_a_targets_own_layer(tmp_path: Path) -> None:
    """From the options alone, as chains and as trees; what the layer keeps is in the sum of memory."""
    folder = write(tmp_path, NEXT | {"mtp_num_hidden_layers": 1}, {})
    bytes_per_token = []
    for asked in (None, OWN, OWN | {"tree_size": 8}):
        config = EngineConfig(
            model=str(folder),
            load_format="dummy",
            device="cpu",
            max_num_seqs=2,
            max_model_len=64,
            num_blocks=20,
            speculative_config=asked,
        )
        engine = build_engine(
            config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
        )
        try:
            bytes_per_token.append(engine.executor.sizing.shape.layout.bytes_per_token)
        finally:
            engine.close()
    assert bytes_per_token[1] == bytes_per_token[2] == 2 * bytes_per_token[0] > 0, (
        "one layer of three attends, and the one beside them"
    )


def starting(folder: Path, asked: dict[str, Any], limit: int = 64) -> Engine:
    """An engine of dummy weights over ``folder``; ``limit``: its max_model_len."""
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        max_num_seqs=2,
        max_model_len=limit,
        num_blocks=40,
        speculative_config=asked,
    )
    return build_engine(config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_speculative_tokens": 30, "tree_size": 33, "limit": 33}, "tree_size is 33, .* max_model_len is 33: type"),
        ({"tree_top_k": 12, "vocabulary": 11}, 'tree_top_k is 12, but the vocabulary of .* has 11 ids: type "tree_top'),
    ],
)
def test_models_without_room_for_trees_are_refused(asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Where a context or a vocabulary is too small."""
    limit, model = asked.get("limit", 64), {**TINY, "vocab_size": asked.get("vocabulary", 100)}
    keys = {"method": "synthetic", "num_speculative_tokens": 3, "tree_size": 4, "synthetic_acceptance_length": 2}
    keys |= {key: asked[key] for key in asked if key not in ("limit", "vocabulary")}
    with pytest.raises(ConfigError, match=said):
        starting(write(tmp_path, model, {}), keys, limit)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"tree_size": 6},
            'rows bring 6 tokens .* over 2 key heads of 16 takes 5 at once: type "tree_size": 5',
        ),
        (
            {"tree_size": None, "num_speculative_tokens": 5},
            'bring 6 tokens .* type "num_speculative_tokens": 4 or',
        ),
    ],
)
def test_windows_that_no_kernel_takes_are_refused(
    asked: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda *_: 5, op="longest_window")
    keys = {"method": "synthetic", "num_speculative_tokens": 3, "synthetic_acceptance_length": 2, **asked}
    with pytest.raises(ConfigError, match=said):
        starting(write(tmp_path, TINY, {}), {key: value for key, value in keys.items() if value is not None})


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "ngram"},
        {"method": "mtp"},
        {"method": "synthetic", "synthetic_acceptance_length": 2},
    ],
    ids=lambda keys: str(keys["method"]),
)
def test_contexts_without_room_for_a_chain_are_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    """W of a whole context, with both values; with what the message says to type there is room."""
    folder = write(tmp_path, TINY | {"num_nextn_predict_layers": 1}, {})
    said = (
        "num_speculative_tokens is 31, so that a step has 32 tokens a request, but max_model_len is 32: type a longer "
        '--max-model-len, or "num_speculative_tokens": 30 or less'
    )
    with pytest.raises(ConfigError, match=f"^{said}$"):
        starting(folder, keys | {"num_speculative_tokens": 31}, 32)
    for tokens, limit in ((30, 32), (31, 33)):
        starting(folder, keys | {"num_speculative_tokens": tokens}, limit).close()


LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("dflash", {"vocab_size": 8}, "vocab_size.* 8, .* 9"),
        ("mtp", {"vocab_size": 8}, "vocab_size.* 8, .* 9"),
        ("eagle3", {"vocab_size": 8}, "vocab_size.* 8, .* 9"),
        (
            "dflash",
            {"num_target_layers": None, "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 8}},
            r"layers \[0, 2\], .* 2 layers, 0 to 1: there is no layer 2",
        ),
        ("eagle3", {"eagle_config": {LAYERS: [0, 2]}}, r"layers \[0, 2\], .* 2 layers, 0 to 1"),
        (
            "dflash",
            {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 9}},
            "'mask_token_id' is 9, .* has 9 ids",
        ),
        ("dflash", {"num_target_layers": 3}, "3 layers .'num_target_layers'., .* 2"),
    ],
)
def test_what_a_drafter_does_not_share_with_its_target_is_refused_at_the_start(
    method: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """By the door that everybody comes through, with the file, both values, and what to use instead."""
    own = {"dflash": DFLASH, "mtp": MTP, "eagle3": eagle3_config(**SIZES)}[method]
    folder = write(tmp_path / "drafter", {**own, **changes}, {})
    with pytest.raises(ModelConfigError, match=rf"drafter/config\.json: .*{said}.*made for this target"):
        starting(write(tmp_path / "target", TINY | SHAPE, {}), asking(method, folder))


@pytest.mark.parametrize("tree", [0, 12])
@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_scripted_acceptance_over_a_drafter_without_weights(method: str, tree: int, tmp_path: Path) -> None:
    """What a bench measures: the drafter computes, the script decides. Every round keeps two guesses of three here."""
    (tmp_path / "config.json").write_text(json.dumps(DFLASH if method == "dflash" else MTP), encoding="utf-8")
    keys = asking(method, tmp_path, rejection_sample_method="synthetic", synthetic_acceptance_length=3, token_map=6)
    keys |= {"tree_size": tree, "tree_top_k": 5} if tree else {}
    proposer = proposer_for(speculative_config(keys), load_format="dummy", seed=1)
    requests = [request(i, range(1, 6 + i), max_tokens=31, stops=()) for i in range(3)]
    with rig(depth=2, widths=(4,), proposer=proposer, shape=SHAPE, max_model_len=64, tree=tree) as engine:
        finished = run(engine, requests)
        engine.stop()
        counters = dict(engine.counters)
    assert all(len(one.token_ids) == 31 for one in finished.values())
    assert counters["spec_num_drafts"] == 3 * 10
    assert counters["spec_num_accepted_tokens"] == 3 * 20


def test_a_drafters_state_takes_no_snapshots_of_a_model_that_keeps_none() -> None:
    """A layer of MTP keeps a state by slot. The target's prefixes are found block by block all the same."""
    shared, found = [5 + i % 900 for i in range(64)], []
    for asked in (None, asking("mtp", DEMO / "mtp")):
        config = EngineConfig(
            model=str(DEMO), device="cpu", max_num_seqs=2, max_model_len=128, num_blocks=32, speculative_config=asked
        )
        control = SingleRankControl()
        with build_engine(config, control=control, collectives=SingleRank(), agree_min=int, device="cpu") as engine:
            assert engine.executor.snapshots == 0
            for number in range(3):
                run(engine, [request(number, [*shared, 1000 + number], max_tokens=4)])
            counters = engine.scheduler.counters
            found.append((counters.prefix_hit_tokens, counters.snapshot_saves))
            engine.stop()
    assert found == [(2 * 64, 0)] * 2
