"""Both drafters, over a paged cache, against the serial oracle; and what their configurations refuse."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.checkpoint import WeightsError
from models.config import ModelConfigError
from models.drafters.dflash import DFlashDraft
from models.drafters.draft_config import BlockView, DFlashConfig, MTPConfig, default_layer_ids
from models.drafters.load import load_dflash, load_mtp, load_own_mtp
from models.drafters.mtp import MTPDraft
from models.inputs import DecodeAttention, StepInputs
from models.kernels.interface import Rotation
from models.layers.decoder import Decoder
from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm.collectives import Collectives, SingleRank
from tests.models.drafters import serial_oracle
from tests.models.drafters.tiny_drafters import (
    SIZES,
    dflash_config,
    dflash_tensors,
    fused_experts,
    less_one,
    mtp_config,
    mtp_tensors,
    own_mtp_config,
    write,
)
from tests.models.kv_layers import kv_layers
from tests.models.tiny_checkpoint import RankOf
from tests.models.tiny_delta import FAMILIES
from tests.plant import Kernels, invariant_kernels, kernels_with, reference_kernels
from tests.runtime.engine.tensor_ranks import LateSums, Meeting, MetCollectives, PushedSums, pushed

PAGE = 4
TARGET = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "tie_word_embeddings": False}
FULL, SLIDING = "full_attention", "sliding_attention"


def target(
    keys: dict[str, Any] = TARGET, collectives: Collectives | None = None, kernels: Kernels | None = None
) -> Decoder:
    """By default of one rank."""
    config, of_group = config_from_dict(keys), collectives or SingleRank()
    used = kernels or reference_kernels()
    return load_model(config, None, load_format="dummy", collectives=of_group, kernels=used, seed=3)


def paged(layout: Any, rows: int) -> tuple[list[Tensor], Tensor]:
    """A cache in which everything nobody wrote is NaN, and a page table in which no two rows share a page."""
    pages = 16
    caches = kv_layers(layout, 1 + rows * pages, PAGE, fill=float("nan"))
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(1)) + 1
    return caches, order.view(rows, pages).to(torch.int32)


def kv_slots(table_BP: Tensor, row: int, positions: Tensor) -> Tensor:
    return table_BP[row].long()[positions // PAGE] * PAGE + positions % PAGE


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": [SLIDING, FULL], "sliding_window": 5},
        {"layer_types": [SLIDING, SLIDING], "sliding_window": 7, "is_causal": False},
        {"layer_types": [FULL, SLIDING], "sliding_window": 30, "is_causal": True},
    ],
    ids=["full", "sliding", "sliding both ways", "causal"],
)
def test_a_block_is_what_the_oracle_computes(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Three rows with contexts of different lengths, appended in pieces, some of which are written twice."""
    config = dflash_config(**changes)
    tensors = dflash_tensors(config)
    draft = load_dflash(target(), DFlashConfig.from_dict(config), write(tmp_path, config, tensors))
    contexts, width = [3, 21, 12], 6
    caches, table_BP = paged(draft.cache_layout, len(contexts))
    generator = torch.Generator().manual_seed(2)
    features = [torch.randn(n, 2 * SIZES["hidden_size"], generator=generator) for n in contexts]
    embedded = torch.randn(len(contexts), width, SIZES["hidden_size"], generator=generator)
    for row, context in enumerate(features):
        for first in range(0, len(context), 5):
            here = torch.arange(first, min(first + 7, len(context)))
            draft.append_context(context[here], here, kv_slots(table_BP, row, here), caches)
    begins = torch.tensor(contexts)
    positions = (begins[:, None] + torch.arange(width)).view(-1)
    slots = torch.cat([kv_slots(table_BP, row, n + torch.arange(width)) for row, n in enumerate(contexts)])
    attention = DecodeAttention(table_BP, (begins + width).to(torch.int32), width, 16 * PAGE)
    inputs = StepInputs(positions, positions, slots, attention)
    found = draft(embedded.flatten(0, 1).clone(), inputs, caches).view(len(contexts), width, -1)
    for row, context in enumerate(features):
        expected = serial_oracle.dflash_block(tensors, config, context, embedded[row])
        torch.testing.assert_close(found[row], expected, rtol=2e-4, atol=2e-4)


def entries(draft: DFlashDraft, features_TF: Tensor) -> list[Tensor]:
    """What ``append_context`` writes of tokens 0 to T - 1 of one row, a layer: [2, T, K, D]."""
    caches, table_BP = paged(draft.cache_layout, 1)
    positions = torch.arange(len(features_TF))
    slots = kv_slots(table_BP, 0, positions)
    draft.append_context(features_TF, positions, slots, caches)
    return [kv.flatten(1, 2)[:, slots] for kv in caches]


def entries_by_definition(
    tensors: dict[str, Tensor], config: dict[str, Any], draft: DFlashDraft, features_TF: Tensor
) -> list[Tensor]:
    """The same of all heads: ``fc`` at once, and of each layer a product for its keys and one for its values."""
    kernels, found = reference_kernels(), []
    context_TN = kernels.rms_norm(features_TF @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], 1e-6)
    positions = torch.arange(len(features_TF))
    for number in range(config["num_hidden_layers"]):
        part = f"layers.{number}.self_attn."
        kv_TX = torch.cat(
            [
                context_TN @ tensors[f"{part}{name}.weight"].T + tensors.get(f"{part}{name}.bias", torch.zeros(()))
                for name in ("k_proj", "v_proj")
            ],
            1,
        )
        norm_D = tensors[f"{part}k_norm.weight"]
        kv = torch.zeros(2, 1, len(features_TF), config["num_key_value_heads"], config["head_dim"])
        turn = Rotation(norm_D, norm_D, 1e-6, draft.cos_sin_LR, positions, positions)
        kernels.rope_and_cache(kv_TX, 0, kv, turn)
        found.append(kv[:, 0])
    return found


def biased(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the biases of ``attention_bias``."""
    generator = torch.Generator().manual_seed(9)
    widths = {
        "q": config["num_attention_heads"],
        "k": config["num_key_value_heads"],
        "v": config["num_key_value_heads"],
    }
    sizes = {f"{name}_proj": heads * config["head_dim"] for name, heads in widths.items()}
    sizes["o_proj"] = config["hidden_size"]
    return tensors | {
        f"layers.{number}.self_attn.{name}.bias": torch.randn(size, generator=generator)
        for number in range(config["num_hidden_layers"])
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("size", "sums"), [(1, MetCollectives), (2, MetCollectives), (4, LateSums), (2, PushedSums)], ids=str
)
def test_entries_are_those_of_whole_products_whatever_the_ranks(
    size: int, sums: type[MetCollectives], bias: bool, tmp_path: Path
) -> None:
    """Each rank reads its share of ``fc`` and of the heads; four ranks have two key/value heads twice."""
    config = dflash_config(attention_bias=bias)
    tensors = dflash_tensors(config)
    if bias:
        tensors = biased(config, tensors)
    folder, meeting = write(tmp_path, config, tensors), Meeting(size)
    features = [torch.randn(n, 48, generator=torch.Generator().manual_seed(n)) for n in (1, 7, 30)]

    def of_rank(rank: int) -> tuple[DFlashDraft, list[list[Tensor]]]:
        collectives = sums(meeting, rank) if size > 1 else None
        kernels = kernels_with(linear_push=pushed) if sums is PushedSums else None
        draft = load_dflash(target(collectives=collectives, kernels=kernels), DFlashConfig.from_dict(config), folder)
        return draft, [entries(draft, some) for some in features]

    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(of_rank, range(size)))
    for rank, (draft, found) in enumerate(ranks):
        assert torch.equal(draft.fc.weight.data, tensors["fc.weight"].chunk(size, 1)[rank]), "its share of the columns"
        heads = slice(rank * 2 // size, rank * 2 // size + max(1, 2 // size))
        for some, layers in zip(features, found, strict=True):
            expected = entries_by_definition(tensors, config, draft, some)
            assert len(layers) == len(expected) == 2
            for layer, whole in zip(layers, expected, strict=True):
                torch.testing.assert_close(layer, whole[:, :, heads], rtol=2e-5, atol=2e-5)


def test_an_entry_of_the_deterministic_mode_does_not_depend_on_the_others(tmp_path: Path) -> None:
    config = dflash_config()
    folder = write(tmp_path, config, dflash_tensors(config))
    draft = load_dflash(target(kernels=invariant_kernels()), DFlashConfig.from_dict(config), folder)
    features = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
    for some, few in zip(entries(draft, features), entries(draft, features[:4]), strict=True):
        assert torch.equal(some[:, :4], few)


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_features_are_projected_by_pieces_of_one_weight(size: int) -> None:
    config = DFlashConfig.from_dict(dflash_config())
    whole, *parts = (
        load_dflash(target(collectives=group), config, None, load_format="dummy", seed=5).fc.weight.data
        for group in (None, *(RankOf(rank, size) for rank in range(size)))
    )
    assert torch.equal(torch.cat(parts, 1), whole)


def test_features_that_ranks_cannot_share_are_refused_with_what_to_type() -> None:
    """Heads would be split over four ranks, 2 * 27 features are not."""
    sizes = {"hidden_size": 27}
    model = target({**TARGET, **sizes}, RankOf(1, 4))
    config = DFlashConfig.from_dict(dflash_config(**sizes))
    with pytest.raises(ValueError, match=r"54 features .* over 4 tensor-parallel ranks; .* out of \[1, 2, 3, 6"):
        load_dflash(model, config, None, load_format="dummy")


@pytest.mark.parametrize("changes", [{}, {"norm_zero_centered": True, "attn_output_gate": True}], ids=str)
def test_guesses_of_an_mtp_layer_are_the_oracles(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The layer's own hidden state takes the place of the target's from the second guess on."""
    model, config = target(), mtp_config(**changes)
    tensors = mtp_tensors(config)
    stored = less_one(tensors) if config.get("norm_zero_centered") else tensors
    draft = load_mtp(model, MTPConfig.from_dict(config), write(tmp_path, config, stored))
    compare_guesses(model, draft, config, tensors)


@pytest.mark.parametrize(
    ("family", "fused"),
    [("qwen3.5", False), ("qwen3.5-moe", False), ("qwen3.5-moe", True), ("qwen3-next", False), ("qwen3-next", True)],
)
def test_guesses_of_a_hybrids_own_mtp_layer_are_the_oracles(tmp_path: Path, family: str, fused: bool) -> None:
    """Out of a checkpoint with other tensors; experts in either layout; a part of each head is rotated."""
    config = own_mtp_config({**TARGET, **FAMILIES[family], "partial_rotary_factor": 0.4})
    model, tensors = target(config), mtp_tensors(config)
    stored = fused_experts(less_one(tensors)) if fused else less_one(tensors)
    draft = load_own_mtp(model, write(tmp_path, config, {"model.norm.weight": torch.ones(24), **stored}))
    compare_guesses(model, draft, config, tensors)


def test_a_layer_of_its_own_with_a_tensor_too_many_is_refused_by_name(tmp_path: Path) -> None:
    config = own_mtp_config({**TARGET, **FAMILIES["qwen3.5"], "partial_rotary_factor": 0.4})
    tensors = mtp_tensors(config)
    tensors["mtp.embed_tokens.weight"] = torch.zeros(37, 24)
    with pytest.raises(WeightsError, match=r"does not have.*mtp\.embed_tokens\.weight"):
        load_own_mtp(target(config), write(tmp_path, config, tensors))
    del tensors["mtp.embed_tokens.weight"], tensors["mtp.norm.weight"]
    with pytest.raises(WeightsError, match=r"no file holds.*mtp\.norm\.weight"):
        load_own_mtp(target(config), write(tmp_path, config, tensors))


def compare_guesses(model: Decoder, draft: MTPDraft, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As the serial oracle drafts with these tensors."""
    embedding, head = model.embedding.weight.data, model.lm_head.weight.data
    compare_drafts(model, draft, partial(serial_oracle.mtp_guesses, tensors, config, embedding, head))


def compare_drafts(model: Decoder, draft: MTPDraft, expected: Callable[[list[int], Tensor, int], list[int]]) -> None:
    """Three rows, with entries appended and then a token a pass. ``expected``: of a row's tokens, the target's states
    of all but the last, and how many."""
    lengths, count = [2, 19, 8], 5
    caches, table_BP = paged(draft.cache_layout, len(lengths))
    generator = torch.Generator().manual_seed(5)
    sizes = model.config
    tokens = [torch.randint(0, sizes.vocab_size, (n,), generator=generator) for n in lengths]
    hidden = [torch.randn(n - 1, sizes.hidden_size, generator=generator) for n in lengths]
    for row, n in enumerate(lengths):
        here = torch.arange(n - 1)
        draft.append(model.embedding(tokens[row][1:]), hidden[row], here, kv_slots(table_BP, row, here), caches[0])
    states, newest = torch.stack([h[-1] for h in hidden]), torch.stack([t[-1] for t in tokens])
    guesses = []
    for number in range(count):
        positions = torch.tensor(lengths) - 2 + number
        slots = torch.cat([kv_slots(table_BP, row, p[None]) for row, p in enumerate(positions)])
        attention = DecodeAttention(table_BP, (positions + 1).to(torch.int32), 1, 16 * PAGE)
        real_T = torch.ones(len(lengths), dtype=torch.bool)
        inputs = StepInputs(newest, positions, slots, attention, real_T=real_T)
        states = draft(model.embedding(newest), states, inputs, caches[0])
        newest = model.logits(states).argmax(-1)
        guesses.append(newest)
    for row in range(len(lengths)):
        of_row = tokens[row].tolist()
        assert torch.stack(guesses)[:, row].tolist() == expected(of_row, hidden[row], count)


@pytest.mark.parametrize("rename", ["model.", "encoder"])
def test_other_spellings_of_a_checkpoint_fill_the_same_drafter(tmp_path: Path, rename: str) -> None:
    config = dflash_config(num_hidden_layers=1, layer_types=[FULL])
    tensors = dflash_tensors(config)
    if rename == "model.":
        renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    else:
        renamed = {
            name.replace("layers.0.", "midlayer.")
            .replace("fc.", "encoder.fc.")
            .replace("hidden_norm.", "encoder.output_norm_enc."): tensor
            for name, tensor in tensors.items()
        }
    drafts = [
        load_dflash(target(), DFlashConfig.from_dict(config), write(tmp_path / name, config, some))
        for name, some in (("a", tensors), ("b", renamed))
    ]
    first, second = (dict(draft.named_parameters()) for draft in drafts)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_target_that_scales_its_residual_stream_is_refused_by_name() -> None:
    granite = replace(config_from_dict(TARGET), residual_scale=0.22)
    for drafter in (DFlashConfig.from_dict(dflash_config()), MTPConfig.from_dict(mtp_config())):
        with pytest.raises(ValueError, match=r"'residual_multiplier' 0\.22\); use \"method\": \"ngram\""):
            drafter.check_target(granite)


def test_a_checkpoint_of_other_sizes_is_refused_by_name(tmp_path: Path) -> None:
    config = dflash_config()
    tensors = dflash_tensors(config)
    tensors["fc.weight"] = tensors["fc.weight"][:, :24]
    with pytest.raises(WeightsError, match=r"fc\.weight.*\[24, 24\].*\[24, 48\]"):
        load_dflash(target(), DFlashConfig.from_dict(config), write(tmp_path, config, tensors))
    del tensors["fc.weight"]
    with pytest.raises(WeightsError, match=r"fc\.weight"):
        load_dflash(target(), DFlashConfig.from_dict(config), write(tmp_path, config, tensors))


def own(**keys: Any) -> dict[str, Any]:
    return {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 36} | keys}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "DFlashDraftModel"),
        (own(conv_kernel_size=2), "conv_kernel_size.*not implemented"),
        (own(selector_rank=256), "selector_rank.*not implemented"),
        (own(projector_type="mlp"), "projector_type.*not implemented"),
        ({"projector_type": "mlp"}, "projector_type.*not implemented"),
        (own(wings=2), "not understood: wings"),
        (own(attention_sink_bias=True), "attention_sink_bias"),
        (own(attention_value_scale=2.0), "attention_value_scale"),
        (own(mask_token_id=None), "mask_token_id.*missing"),
        (own(mask_token_id=None, mask_token="<m>"), "mask_token_id.*missing.*<m>"),
        (own(mask_token_id=-1), "must be a token id, not -1"),
        (own(target_layer_ids=[1, 0]), "must ascend"),
        (own(target_layer_ids=[]), "must list layer numbers"),
        ({"block_size": None}, "block_size.*missing"),
        ({"block_size": 1}, "block_size.*is 1"),
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": [SLIDING, FULL]}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "'quant_method' None is not supported"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DFlashConfig.from_dict(dflash_config(**changes))


@pytest.mark.parametrize(
    ("changes", "of_target", "values"),
    [
        ({}, {"vocab_size": 40}, ["vocab_size", "37", "40"]),
        ({}, {"hidden_size": 32}, ["hidden_size", "24", "32"]),
        ({}, {"layers": 3}, ["num_target_layers", "2", "3"]),
        (own(target_layer_ids=[0, 2]) | {"num_target_layers": None}, {}, ["layer 2", "0 to 1"]),
        (own(mask_token_id=37), {}, ["mask_token_id", "37", "vocabulary has 37"]),
    ],
    ids=str,
)
def test_drafters_of_other_targets_are_refused_with_both_values(
    changes: dict[str, Any], of_target: dict[str, Any], values: list[str]
) -> None:
    config = DFlashConfig.from_dict(dflash_config(**changes))
    with pytest.raises(ValueError, match="made for") as error:
        config.check_target(replace(config_from_dict(TARGET), **of_target))
    assert all(value in str(error.value) for value in values), str(error.value)
    assert "use the" in str(error.value)


@pytest.mark.parametrize(
    ("of_target", "values"),
    [
        ({"vocab_size": 40}, ["vocab_size", "37", "40"]),
        ({"hidden_size": 32}, ["hidden_size", "24", "32"]),
        ({"layers": 3}, ["num_target_layers", "2", "3"]),
    ],
    ids=str,
)
def test_mtp_layers_of_other_targets_are_refused_with_both_values(of_target: dict[str, Any], values: list[str]) -> None:
    config = MTPConfig.from_dict(mtp_config())
    with pytest.raises(ValueError, match="made for") as error:
        config.check_target(replace(config_from_dict(TARGET), **of_target))
    assert all(value in str(error.value) for value in values), str(error.value)


def test_mtp_of_several_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers"):
        MTPConfig.from_dict(mtp_config(num_hidden_layers=2))


def test_an_mtp_layers_folder_that_is_the_targets_is_refused_with_what_to_type() -> None:
    with pytest.raises(ValueError, match=r"not \['Qwen3NextForCausalLM'\].*leave \"model\" out"):
        MTPConfig.from_dict({**TARGET, **FAMILIES["qwen3-next"]})


def test_errors_name_the_file(tmp_path: Path) -> None:
    write(tmp_path, dflash_config(block_size=1), {})
    with pytest.raises(ModelConfigError, match=r"config\.json: 'block_size' is 1"):
        DFlashConfig.from_folder(tmp_path)
    with pytest.raises(ModelConfigError, match=r"holds no config\.json"):
        MTPConfig.from_folder(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("layers", "drafts", "ids"),
    [
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (40, 5, (1, 10, 19, 28, 37)),
        (36, 1, (18,)),
    ],
)
def test_layers_that_are_read_where_the_config_names_none(layers: int, drafts: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(layers, drafts) == ids


def test_views_follow_the_published_precedence() -> None:
    def views(**changes: Any) -> tuple[BlockView, ...]:
        return DFlashConfig.from_dict(dflash_config(**changes)).views

    mixed = {"layer_types": [SLIDING, FULL], "sliding_window": 2048}
    assert views() == (BlockView(), BlockView())
    assert views(**mixed) == (BlockView(True, 2048), BlockView())
    assert views(**mixed, is_causal=False) == (BlockView(False, 2048), BlockView())
    assert views(**mixed, **own(causal=False)) == (BlockView(False, 2048), BlockView())
    assert views(**mixed, **own(causal=False), is_causal=True) == (BlockView(True, 2048), BlockView(True))
    window = {"use_swa": True, "swa_window_size": 64}
    for types in (None, [FULL, FULL]):
        assert views(layer_types=types, **own(**window)) == (BlockView(False, 64),) * 2
        assert views(layer_types=types, **own(**window, causal=True)) == (BlockView(True, 64),) * 2
    assert views(**mixed, **own(**window)) == (BlockView(True, 64), BlockView())
