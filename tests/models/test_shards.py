"""Shard arithmetic and dummy weights: ranks' pieces make up the model, whatever the tensor-parallel size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.dummy import DummyTensor
from models.kv_group import keys_and_values
from models.layers.decoder import Decoder
from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from parallel.layers.linear import ColumnParallel, RowParallel
from parallel.layers.shard import HeadShard, ShardContext, VocabShard
from tests.models.tiny_checkpoint import TINY, RankOf, build, full_tensors
from tests.models.tiny_delta import FAMILIES as DELTA_FAMILIES
from tests.models.tiny_families import FAMILIES as OTHERS
from tests.plant import reference_kernels

WIDE = {**TINY, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
FAMILIES = {
    "llama": {**TINY, "architectures": ["LlamaForCausalLM"], "mlp_bias": True},
    "qwen2": {**TINY, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1},
    "qwen3": WIDE,
    **{family: TINY | delta | {"head_dim": 16} for family, delta in DELTA_FAMILIES.items()},
    **{family: TINY | changes for family, changes in OTHERS.items()},
}


def dummy(config: dict[str, Any], rank: int, size: int, seed: int = 0) -> Decoder:
    return load_model(
        config_from_dict(config),
        None,
        load_format="dummy",
        collectives=RankOf(rank, size),
        kernels=reference_kernels(),
        seed=seed,
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_cover_every_parameter_exactly_once(family: str, size: int) -> None:
    for rank in range(size):
        model = build(config_from_dict(FAMILIES[family]), rank, size)
        padding = model.vocab_shard.width - model.vocab_shard.rows
        for name, parameter in model.named_parameters():
            parameter.zero_()
            if padding and parameter.shape[0] == model.vocab_shard.width and name.startswith(("embedding", "lm_head")):
                parameter[-padding:] = 1
        for shard in model.checkpoint_shards().values():
            for piece in shard.pieces:
                piece.target.add_(1)
        assert all(bool((parameter == 1).all()) for parameter in model.parameters())


@pytest.mark.parametrize("size", [2, 4])
def test_every_element_of_the_checkpoint_is_on_some_rank(size: int) -> None:
    config = config_from_dict(WIDE)
    seen = {name: torch.zeros(tensor.shape) for name, tensor in full_tensors(config).items()}
    for rank in range(size):
        for name, shard in build(config, rank, size, device="meta").checkpoint_shards().items():
            for piece in shard.pieces:
                seen[name][piece.ranges] += 1
    for name, count in seen.items():
        replicas = max(1, size // config.kv_heads) if ".k_proj" in name or ".v_proj" in name else 1
        if "norm" in name or name.endswith("o_proj.bias"):
            replicas = size
        assert bool((count == replicas).all()), name


@pytest.mark.parametrize(("k_heads", "size"), [(1, 4), (2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_a_delta_net_is_split_by_value_heads_and_repeats_key_heads(family: str, k_heads: int, size: int) -> None:
    """How often the ranks have each row of a checkpoint tensor; what each has is compared with transformers' parity."""
    config = config_from_dict(FAMILIES[family] | {"linear_num_key_heads": k_heads})
    assert config.delta is not None
    seen: dict[str, torch.Tensor] = {}
    for rank in range(size):
        for name, shard in build(config, rank, size, device="meta").checkpoint_shards().items():
            for piece in shard.pieces:
                seen.setdefault(name, torch.zeros(shard.full_shape))[piece.ranges] += 1
    copies, keys, values = max(1, size // k_heads), config.delta.keys, config.delta.values
    of_conv = torch.tensor([copies] * (2 * keys) + [1] * values)
    counts = {name: count.flatten(1)[:, 0] for name, count in seen.items() if count.dim() > 1}
    assert torch.equal(counts["model.layers.0.linear_attn.conv1d.weight"], of_conv)
    assert bool((seen["model.layers.0.linear_attn.A_log"] == 1).all())
    assert bool((seen["model.layers.0.linear_attn.out_proj.weight"] == 1).all())
    if family == "qwen3-next":
        found = counts["model.layers.0.linear_attn.in_proj_qkvz.weight"].view(k_heads, -1)
        of_keys = 2 * config.delta.k_dim
        assert bool((found[:, :of_keys] == copies).all())
        assert bool((found[:, of_keys:] == 1).all())
        assert bool((counts["model.layers.0.linear_attn.in_proj_ba.weight"] == 1).all())
    else:
        assert torch.equal(counts["model.layers.0.linear_attn.in_proj_qkv.weight"], of_conv)
        for part in "zba":
            assert bool((counts[f"model.layers.0.linear_attn.in_proj_{part}.weight"] == 1).all())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_dummy_weights_do_not_depend_on_the_group(size: int) -> None:
    full = full_tensors(config_from_dict(WIDE), seed=7)
    for rank in range(size):
        for name, shard in dummy(WIDE, rank, size, seed=7).checkpoint_shards().items():
            for piece in shard.pieces:
                assert torch.equal(piece.target, full[name][piece.ranges]), name


def test_dummy_weights_follow_seed_name_and_shape() -> None:
    def values(seed: int, name: str, rows: int) -> torch.Tensor:
        return DummyTensor(seed, name, (rows, 50), 0.0, "cpu")[slice(0, 40), slice(0, 50)]

    first = values(0, "a", 40)
    assert torch.equal(first, values(0, "a", 40))
    for other in (values(1, "a", 40), values(0, "b", 40), values(0, "a", 41)):
        assert int((first == other).sum()) < 5


def test_dummy_values_look_random() -> None:
    """Mean, spread and neighbours' correlation of 10^6 values, each within five standard errors."""
    x = DummyTensor(3, "w", (1000, 1000), 0.0, "cpu")[slice(0, 1000), slice(0, 1000)] * 1000**0.5
    assert abs(float(x.mean())) < 5e-3
    assert abs(float(x.pow(2).mean()) - 1) < 5e-3
    assert float(x.abs().max()) <= 3**0.5 + 1e-6
    for y in (x[:, :-1] * x[:, 1:], x[:-1] * x[1:], x[:-1, :-1] * x[1:, 1:]):
        assert abs(float(y.mean())) < 5e-3
    assert x.unique().numel() > 900_000


def test_large_pieces_are_made_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = DummyTensor(0, "w", (64, 48), 0.0, "cpu")
    whole = tensor[slice(0, 64), slice(0, 48)]
    monkeypatch.setattr("models.dummy._CHUNK", 100)
    assert torch.equal(tensor[slice(3, 60), slice(5, 40)], whole[3:60, 5:40])


@pytest.mark.parametrize("shape", [(48,), (6, 1, 4), (5, 7, 9), (3, 2, 4, 5)])
def test_pieces_of_any_number_of_dims_are_parts_of_one_tensor(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """A short convolution's weight has three dims."""
    tensor = DummyTensor(0, "conv", shape, 0.5, "cpu")
    whole = tensor[tuple(slice(0, size) for size in shape)]
    assert whole.shape == shape
    assert len(set(whole.flatten().tolist())) == whole.numel()
    reach = (3 / shape[-1]) ** 0.5
    assert float((whole - 0.5).abs().max()) <= reach
    assert float(whole.max() - whole.min()) > reach
    piece = tuple(slice(size // 3, size) for size in shape)
    assert torch.equal(tensor[piece], whole[piece])
    target = torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]  # a view with gaps
    monkeypatch.setattr("models.dummy._CHUNK", 10)
    tensor.fill(target, tuple(slice(0, size) for size in shape))
    assert torch.equal(target, whole)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "legal"), [(8, 2, [1, 2, 4, 8]), (12, 4, [1, 2, 4, 12]), (6, 6, [1, 2, 3, 6])]
)
def test_legal_head_splits(heads: int, kv_heads: int, legal: list[int]) -> None:
    assert HeadShard.legal_sizes(heads, kv_heads) == legal
    for size in legal:
        group = heads // kv_heads
        for rank in range(size):
            shard = HeadShard(heads, kv_heads, rank, size)
            for head in range(shard.local_heads):  # each query head must find its own key/value head on its rank
                wanted = (shard.first_head + head) // group
                local_group = shard.local_heads // shard.local_kv_heads
                assert shard.first_kv_head + head // local_group == wanted


def test_uneven_splits_name_the_legal_sizes() -> None:
    placement = ShardContext(RankOf(0, 4), reference_kernels(), torch.float32)
    with pytest.raises(ValueError, match=r"6 query heads and 2 key/value heads .* over 4 .* out of \[1, 2, 6\]"):
        HeadShard(6, 2, 0, 4)
    with pytest.raises(ValueError, match=r"10 outputs .* over 4 .* out of \[1, 2, 5, 10\]"):
        ColumnParallel(8, 10, placement)
    with pytest.raises(ValueError, match=r"9 gates .* over 4 .* out of \[1, 3, 9\]"):
        RowParallel(9, 8, placement, what="gates")
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM with 8 heads.* over 3 .* out of \[1, 2, 4, 8\]"):
        build(config_from_dict(WIDE), 0, 3)


@pytest.mark.parametrize("vocab_size", [1, 5, 8, 37])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocabulary_shards_concatenate_to_the_padded_vocabulary(vocab_size: int, size: int) -> None:
    shards = [VocabShard(vocab_size, rank, size) for rank in range(size)]
    ids = [shard.rank * shard.width + row for shard in shards for row in range(shard.rows)]
    assert ids == list(range(vocab_size))
    assert [token for shard in shards for token in range(shard.start, shard.end)] == ids
    assert sum(shard.width for shard in shards) < vocab_size + size


def test_padding_logits_are_minus_infinity() -> None:
    for rank in range(4):
        model = dummy({**TINY, "vocab_size": 5}, rank, 4)  # widths of 2: ranks hold 2, 2, 1 and 0 tokens
        logits = model.logits(torch.randn(3, TINY["hidden_size"], generator=torch.Generator().manual_seed(0)))
        assert logits.shape == (3, 2)
        assert bool(logits[:, : model.vocab_shard.rows].isfinite().all())
        assert bool((logits[:, model.vocab_shard.rows :] == float("-inf")).all())


def test_what_a_rank_keeps_of_a_token() -> None:
    layouts = [build(config_from_dict(WIDE), 0, size).cache_layout for size in (1, 2, 4, 8)]
    assert [layout.layers for layout in layouts] == [(keys_and_values(n, 10, torch.float32),) * 2 for n in (2, 1, 1, 1)]
    assert layouts[0].bytes_per_token == 2 * 2 * 2 * 10 * 4
    assert not layouts[0].has_slot_state


def test_a_model_that_reads_images_says_what_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    text = {key: TINY[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = config_from_dict({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    with caplog.at_level("INFO"):
        load_model(config, None, load_format="dummy", collectives=SingleRank(), kernels=reference_kernels())
    assert "Gemma3ForConditionalGeneration: the part that reads and writes text is loaded; images are" in caplog.text


def test_the_text_of_gemma_3_is_found_in_three_spellings() -> None:
    sizes = {key: TINY[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": sizes | {"head_dim": 10}}
    model = build(config_from_dict(config), device="meta")
    alone = model.checkpoint_shards()
    for prefix in ("model.", "model.language_model.", "language_model.model."):
        names = {name.replace("model.", prefix, 1) for name in alone}
        assert model.checkpoint_shards(names).keys() == names
    assert all(model.leaves_unread(f"{prefix}vision_tower.conv.weight") for prefix in ("", "model."))
