"""Experts: their shards, both layouts of their checkpoints, what is refused, and the two operations on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.checkpoint import WeightsError
from models.config import ModelConfigError
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.layers.moe import SparseMLP
from models.layers.routed_experts import RoutedExperts
from models.registry import config_from_dict, config_from_folder, model_class
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from parallel.layers.experts import ExpertSplit, held_experts
from parallel.layers.weight import Weight
from tests.models.tiny_checkpoint import TINY, RankOf, full_tensors, write
from tests.models.tiny_nemotron import NEMOTRON
from tests.plant import Op, kernels_with, plant, reference_kernels

QWEN: dict[str, Any] = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
}
MIXTRAL: dict[str, Any] = {
    **TINY,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SHARED = {**TINY, **NEMOTRON, "attention_bias": False}  # without gates, and a shared expert lies beside the others
ORDER = (5, 0, 7, 2, 1, 6, 3, 4)
SPLITS = {
    "shares": ExpertSplit(),
    "whole": ExpertSplit(whole=True),
    "map": ExpertSplit(whole=True, orders={1: ORDER}),
}


def build(config: dict[str, Any], split: ExpertSplit, rank: int = 0, size: int = 1, device: str = "cpu") -> Decoder:
    read = config_from_dict(config)
    with torch.device(device):
        context = ModelContext(RankOf(rank, size), reference_kernels(), torch.float32, split)
        return model_class(read.architecture)(read, context)


def load(
    folder: Path | None, config: dict[str, Any], split: ExpertSplit, rank: int = 0, size: int = 1, tile: int = 1
) -> Decoder:
    return load_model(
        config_from_dict(config),
        folder,
        load_format="dummy" if folder is None else "safetensors",
        collectives=SingleRank() if size == 1 else RankOf(rank, size),
        kernels=kernels_with(expert_tile=tile),
        experts=split,
    )


def sparse_mlp(model: Decoder) -> SparseMLP:
    """That of layer 1, which has experts in QWEN and MIXTRAL."""
    mlp = model.layers[1].mlp
    assert isinstance(mlp, SparseMLP)
    return mlp


def fused(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The same checkpoint as transformers 5 holds it in memory."""
    experts = config.get("num_experts") or config["num_local_experts"]
    names = {
        "Qwen3MoeForCausalLM": ("mlp", ("gate_proj", "up_proj", "down_proj")),
        "MixtralForCausalLM": ("block_sparse_moe", ("w1", "w3", "w2")),
    }
    block, parts = names[config["architectures"][0]]
    found = dict(tensors)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.{block}"
        if f"{prefix}.gate.weight" not in tensors:
            continue
        gate, up, down = (
            torch.stack([found.pop(f"{prefix}.experts.{e}.{part}.weight") for e in range(experts)]) for part in parts
        )
        found[f"model.layers.{layer}.mlp.gate.weight"] = found.pop(f"{prefix}.gate.weight")
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    return found


# -- configuration ------------------------------------------------------------------------------------------------


def test_which_layers_have_experts() -> None:
    def layers(**changes: Any) -> tuple[int, ...]:
        experts = config_from_dict({**QWEN, "num_hidden_layers": 6, **changes}).experts
        assert experts is not None
        return experts.layers

    assert layers() == (1, 3, 5)
    assert layers(decoder_sparse_step=1) == layers(decoder_sparse_step=None) == (0, 1, 2, 3, 4, 5)
    assert layers(mlp_only_layers=[3, 4]) == (1, 5)
    assert layers(decoder_sparse_step=3, mlp_only_layers=None) == (2, 5)


def test_both_families_are_read() -> None:
    assert config_from_dict(QWEN).experts == RoutedExperts(8, 3, 20, True, (1,))
    assert config_from_dict({**QWEN, "norm_topk_prob": None}).experts == RoutedExperts(8, 3, 20, False, (1,))
    assert config_from_dict(MIXTRAL).experts == RoutedExperts(4, 2, 40, True, (0, 1))
    assert config_from_dict(TINY).experts is None
    of_transformers_5 = {**QWEN, "num_local_experts": 8}
    del of_transformers_5["num_experts"]
    assert config_from_dict(of_transformers_5) == config_from_dict(QWEN)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (QWEN, {"n_group": 8, "topk_group": 4}, ["'n_group' is 8", "'topk_group' 4", "only 1 is", "--model"]),
        (QWEN, {"topk_group": 2}, ["'topk_group' is 2", "group-limited"]),
        (QWEN, {"n_shared_experts": 1}, ["'n_shared_experts' is 1", "only 0 is"]),
        (QWEN, {"shared_expert_intermediate_size": 512}, ["512", "shared expert"]),
        (QWEN, {"routed_scaling_factor": 2.5}, ["'routed_scaling_factor' is 2.5", "only 1.0 is"]),
        (QWEN, {"scoring_func": "sigmoid"}, ["'sigmoid'", "only 'softmax' is"]),
        (QWEN, {"topk_method": "noaux_tc"}, ["'noaux_tc'", "e_score_correction_bias"]),
        (QWEN, {"use_routing_bias": True}, ["'use_routing_bias' is True", "e_score_correction_bias"]),
        (QWEN, {"num_experts_per_tok": 9}, ["'num_experts_per_tok' is 9", "only 8 experts"]),
        (QWEN, {"num_experts": None}, ["'num_experts' is missing"]),
        (QWEN, {"moe_intermediate_size": None}, ["'moe_intermediate_size' is missing"]),
        (QWEN, {"mlp_only_layers": [3]}, ["'mlp_only_layers'", "0 to 2", "[3]"]),
        (MIXTRAL, {"num_local_experts": 1}, ["'num_experts_per_tok' is 2", "only 1 experts"]),
    ],
)
def test_what_is_refused_is_named(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelConfigError) as caught:
        config_from_folder(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_neutral_router_options_are_fine() -> None:
    neutral = {"n_group": 1, "topk_group": 1, "n_shared_experts": 0, "routed_scaling_factor": 1, "topk_method": None}
    assert config_from_dict({**QWEN, **neutral}) == config_from_dict(QWEN)


# -- shards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("stored", [(), ("model.layers.1.mlp.experts.down_proj",)])
def test_shards_cover_every_parameter_exactly_once(split: str, size: int, stored: tuple[str, ...]) -> None:
    for rank in range(size):
        model = build(QWEN, SPLITS[split], rank, size)
        for parameter in model.parameters():
            parameter.zero_()
        for padded in (model.embedding.weight.data, model.lm_head.weight.data):
            padded[model.vocab_shard.rows :] = 1
        for shard in model.checkpoint_shards(stored).values():
            for piece in shard.pieces:
                piece.target.add_(1)
        assert all(bool((parameter == 1).all()) for parameter in model.parameters())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["one by one", "fused"])
def test_every_element_of_every_expert_is_on_one_rank(split: str, size: int, layout: str) -> None:
    tensors = full_tensors(config_from_dict(QWEN))
    tensors = fused(tensors, QWEN) if layout == "fused" else tensors
    seen = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items() if ".experts." in name}
    for rank in range(size):
        shards = build(QWEN, SPLITS[split], rank, size, device="meta").checkpoint_shards(tensors)
        assert shards.keys() == tensors.keys()
        for name in seen:
            assert shards[name].full_shape == tensors[name].shape
            for piece in shards[name].pieces:
                seen[name][piece.ranges] += 1
    assert seen
    assert all(bool((count == 1).all()) for count in seen.values())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("config", [QWEN, MIXTRAL], ids=["qwen", "mixtral"])
def test_both_layouts_and_dummies_fill_the_same_weights(tmp_path: Path, config: dict[str, Any], split: str) -> None:
    """On every rank of a group, from several files; ``full_tensors`` are the dummy values of seed 0."""
    if config is MIXTRAL and split == "map":
        config = {**config, "num_local_experts": 8}
    tensors = full_tensors(config_from_dict(config))
    folders = {"one": tmp_path / "one", "fused": tmp_path / "fused"}
    for name, folder in folders.items():
        folder.mkdir()
        write(folder, tensors if name == "one" else fused(tensors, config), files=3, config=config)
    for rank in range(2):
        models = [load(folder, config, SPLITS[split], rank, 2) for folder in (*folders.values(), None)]
        for (name, parameter), *others in zip(*(model.named_parameters() for model in models), strict=True):
            for other_name, other in others:
                assert other_name == name
                assert torch.equal(other, parameter), name


@pytest.mark.parametrize(
    ("config", "layout"),
    [(QWEN, "one by one"), (QWEN, "fused"), (QWEN, "dummy"), (SHARED, "one by one"), (SHARED, "dummy")],
)
def test_shares_that_are_no_whole_tiles_are_padded_with_zeros(
    tmp_path: Path, config: dict[str, Any], layout: str
) -> None:
    """Eight ranks have 232 features each of an expert of Nemotron-3-Nano, where tensor cores want multiples of 16."""
    tensors = full_tensors(config_from_dict(config))
    write(tmp_path, fused(tensors, config) if layout == "fused" else tensors, config=config)
    folder = None if layout == "dummy" else tmp_path
    for rank in range(2):
        plain, padded = (sparse_mlp(load(folder, config, ExpertSplit(), rank, 2, tile)).experts for tile in (1, 16))
        share, halves = plain.share, 2 if plain.gated else 1
        assert (share % 16, padded.down.inner % 16) == (share, 0)
        gate_up = padded.gate_up.data.view(len(padded.gate_up.data), halves, -1, padded.gate_up.inner)
        assert torch.equal(gate_up[:, :, :share].flatten(1, 2), plain.gate_up.data)
        assert torch.equal(padded.down.data[:, :, :share], plain.down.data)
        assert not gate_up[:, :, share:].any()
        assert not padded.down.data[:, :, share:].any()


@pytest.mark.slow
@torch.inference_mode()
def test_eight_padded_shares_of_nemotron_s_experts_are_the_whole() -> None:
    """The widths of Nemotron-3-Nano: 1,856 features of an expert, 232 a rank, padded to 240 for kernels that want
    multiples of 16; its shared expert, twice as wide, lies beside the others as two more."""
    shape = {"hybrid_override_pattern": "*E", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 32}
    widths = {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
    config = {**SHARED, **shape, **widths}
    torch.manual_seed(0)
    hidden_TN, real_T = torch.randn(6, 32), torch.ones(6, dtype=torch.bool)

    def part(rank: int, size: int, tile: int) -> tuple[SparseMLP, Tensor]:
        mlp = sparse_mlp(load(None, config, ExpertSplit(), rank, size, tile))
        logits_TE = mlp.kernels.router_logits(hidden_TN, mlp.router.weight)
        routed = mlp._route(logits_TE, mlp.experts.local_E, real_T)
        return mlp, mlp._with_shared(mlp._terms(hidden_TN, *routed), hidden_TN)

    whole, right_TN = part(0, 1, 16)
    assert (whole.experts.share, whole.experts.down.data.shape[2], whole.experts.shared) == (1856, 1856, 2)
    sum_TN = torch.zeros_like(right_TN)
    for rank in range(8):
        mlp, part_TN = part(rank, 8, 16)
        assert (mlp.experts.share, mlp.experts.start, mlp.experts.down.data.shape[2]) == (232, 232 * rank, 240)
        sum_TN += part_TN
    assert right_TN.abs().max() > 0
    torch.testing.assert_close(sum_TN, right_TN, rtol=1e-4, atol=1e-4 * float(right_TN.abs().max()))


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refusal(tensors: dict[str, Tensor]) -> str:
        write(tmp_path, tensors, config=QWEN)
        with pytest.raises(WeightsError) as caught:
            load(tmp_path, QWEN, SPLITS["whole"], rank=1, size=2)
        return str(caught.value)

    tensors = full_tensors(config_from_dict(QWEN))
    up = "model.layers.1.mlp.experts.0.up_proj.weight"  # an expert of the other rank
    assert repr(up) in refusal({name: t for name, t in tensors.items() if name != up})
    transposed = refusal(tensors | {up: tensors[up].t().contiguous()})
    assert repr(up) in transposed
    assert "[24, 20]" in transposed
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert repr(bias) in refusal(tensors | {bias: torch.zeros(8)})
    extra = "model.layers.1.mlp.experts.8.up_proj.weight"
    assert repr(extra) in refusal(tensors | {extra: tensors[up].clone()})
    both = fused(tensors, QWEN)["model.layers.1.mlp.experts.down_proj"]
    assert "'model.layers.1.mlp.experts.down_proj'" in refusal(tensors | {"model.layers.1.mlp.experts.down_proj": both})


def test_groups_that_do_not_divide_the_experts_are_told_what_to_type() -> None:
    with pytest.raises(
        ValueError, match=r"8 experts .* over 3 expert-parallel ranks.* out of \[1, 2, 4, 8\].*leave out"
    ):
        held_experts(8, 0, 3)
    twelve = {**QWEN, "num_attention_heads": 8, "num_experts": 12, "decoder_sparse_step": 1}
    with pytest.raises(
        ValueError, match=r"number of experts 12 .* over 8 .* out of \[1, 2, 4\], or leave out --expert-parallel"
    ):
        build({**twelve, "moe_intermediate_size": 16}, ExpertSplit(whole=True), 0, 8)
    with pytest.raises(
        ValueError, match=r"intermediate size of an expert 18 .* over 4 .* out of \[1, 2\], or type --expert-parallel"
    ):
        build({**twelve, "moe_intermediate_size": 18}, ExpertSplit(), 0, 4)
    with pytest.raises(ValueError, match=r"over 8 .* out of \[1, 2, 4\]$"):
        build({**twelve, "moe_intermediate_size": 20}, ExpertSplit(), 0, 8)
    build({**twelve, "intermediate_size": 1}, ExpertSplit(whole=True), 0, 4)  # no layer has a dense MLP


def test_orders_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="each of 4 experts once, but lists 4"):
        held_experts(4, 0, 2, (0, 1, 2, 2))
    with pytest.raises(ValueError, match="type --expert-parallel, or leave out --expert-map"):
        ExpertSplit(whole=False, orders={0: (0, 1)})


# -- operations ---------------------------------------------------------------------------------------------------


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("renormalise", [True, False])
def test_route_top_k_follows_the_formula(renormalise: bool) -> None:
    logits, load = random(50, 12), torch.zeros(12, dtype=torch.int64)
    real = torch.arange(50) % 7 != 0
    local = torch.tensor([-1, 0, 1, -1, 2, -1, 3, 4, -1, 5, -1, -1], dtype=torch.int32)
    weights, chosen = reference_kernels().route_top_k(logits, 3, renormalise, local, real, load)
    expected = logits.softmax(-1).topk(3)
    values = expected.values / expected.values.sum(-1, keepdim=True) if renormalise else expected.values
    torch.testing.assert_close(weights, values)
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int32)
    assert torch.equal(chosen, torch.where(real[:, None], local[expected.indices], -1))
    assert torch.equal(load, torch.bincount(expected.indices[real].flatten(), minlength=12))


def test_equal_scores_choose_the_lower_ids() -> None:
    local = torch.arange(6, dtype=torch.int32)
    weights, chosen = reference_kernels().route_top_k(
        torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]]), 4, True, local, torch.tensor([True])
    )
    assert chosen.tolist() == [[1, 3, 0, 2]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1))


def test_expert_mlp_follows_the_formula_and_masks() -> None:
    tokens, experts, hidden, inner = 9, 4, 6, 5
    x, gate_up, down = random(tokens, hidden), random(experts, 2 * inner, hidden), random(experts, hidden, inner)
    weights = random(tokens, 2).abs()
    chosen = torch.tensor([[0, 1], [1, 2], [3, -1], [-1, -1], [2, 0], [-1, 3], [1, 3], [-1, -1], [0, 3]])
    x[7] = float("nan")
    expected = torch.zeros(tokens, hidden)
    for t in range(tokens):
        for weight, g in zip(weights[t], chosen[t].tolist(), strict=True):
            if g >= 0:
                gate, up = gate_up[g, :inner] @ x[t], gate_up[g, inner:] @ x[t]
                expected[t] += weight * (down[g] @ (gate * gate.sigmoid() * up))
    both = Weight.of(gate_up), Weight.of(down)
    out = reference_kernels().expert_mlp(x, *both, weights, chosen.int(), all_experts=experts)
    torch.testing.assert_close(out, expected)
    assert out[3].tolist() == out[7].tolist() == [0.0] * hidden


@pytest.mark.slow
def test_ranks_terms_add_up() -> None:
    """Whatever the split, the partial sums of all ranks make the layer."""
    x, real = random(11, 24), torch.ones(11, dtype=torch.bool)
    kernels = reference_kernels()

    def partial(split: ExpertSplit, rank: int, size: int) -> Tensor:
        mlp = sparse_mlp(load(None, QWEN, split, rank, size))
        routed = kernels.route_top_k(kernels.linear(x, mlp.router.weight), 3, True, mlp.experts.local_E, real)
        return kernels.expert_mlp(x, mlp.experts.gate_up, mlp.experts.down, *routed, all_experts=mlp.experts.experts)

    expected = partial(ExpertSplit(), 0, 1)
    for split in SPLITS.values():
        torch.testing.assert_close(sum(partial(split, rank, 4) for rank in range(4)), expected)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_kernels_are_told_of_the_experts_of_all_ranks(split: ExpertSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def expert_mlp(_: Op, x_TN: Tensor, *weights_and_choice: object, all_experts: int) -> Tensor:
        told.append(all_experts)
        return torch.zeros_like(x_TN)

    plant(monkeypatch, expert_mlp, op="expert_mlp")
    monkeypatch.setattr(RankOf, "all_reduce", lambda _, x: x)
    mlp, x = sparse_mlp(load(None, QWEN, split, 1, 2)), random(3, 24)
    mlp(x, torch.zeros_like(x), torch.ones(3, dtype=torch.bool))
    assert told == [QWEN["num_experts"]]


def test_masked_tokens_reach_no_expert() -> None:
    """A token that writes into the trash page leaves the layer as if there were no experts, whatever it holds."""
    mlp = sparse_mlp(load(None, QWEN, ExpertSplit()))
    residual, real = random(4, 24), torch.tensor([True, False, True, False])
    x = random(4, 24)
    x[3] = float("inf")
    mlp.load_E = torch.zeros(8, dtype=torch.int64)
    out, _ = mlp(x, residual, real)
    assert out[1].tolist() == out[3].tolist() == [0.0] * 24
    assert bool(out[0].any())
    assert int(mlp.load_E.sum()) == 2 * 3
