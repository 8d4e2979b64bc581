"""The floor of a round of speculation against numbers worked out by hand; drafters' shapes against their modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.bench.roofline import (
    Ceilings,
    DrafterShape,
    Shape,
    drafter_floor,
    drafter_shape,
    round_floor,
    shape_of,
    target_floor,
)
from launch.bench.session import SHAPES
from models.drafters.dflash import DFlashDraft
from models.drafters.draft_config import DFlashConfig, Eagle3Config, MTPConfig
from models.drafters.eagle3 import Eagle3Draft
from models.drafters.load import BlocksDraft
from models.drafters.mtp import MTPDraft
from models.layers.context import ModelContext
from models.registry import config_from_folder
from parallel.comm.collectives import SingleRank
from runtime.speculative_config import speculative_config
from tests.launch.bench.test_roofline import entries
from tests.models.drafters.tiny_drafters import dflash_config
from tests.plant import reference_kernels

ONE = Ceilings(ranks=1, value_bytes=2, bytes_per_s=100.0, flop_per_s=10_000.0)
TWO = Ceilings(ranks=2, value_bytes=2, bytes_per_s=100.0, flop_per_s=10_000.0)
TARGET = Shape(1000, 0, 0, 0, kv=entries(2, 5), state_bytes=50, window_values=3, query_values=20)
CHAIN = DrafterShape(dense=130, head=200, shown_whole=30, shown=40, kv=entries(2, 5), query_values=20)
BLOCK = replace(CHAIN, dense=100, views=(None, 4), block=True)


def test_weights_and_keys_are_read_once_for_all_tokens_of_a_window() -> None:
    """Four rows of three tokens behind ten: 2,000 bytes of weights, 800 of KV, and state read twice and written."""
    floor = target_floor(TARGET, ONE, batch=4, length=10, tokens=3)
    assert (floor.weight_bytes, floor.kv_bytes, floor.state_bytes) == (2000, 800, 4 * (3 * 50 + 2 * 2 * 3))
    assert floor.flop == 2 * 1000 * 12 + 4 * 40 * 3 * 20
    assert floor.seconds == pytest.approx((2000 + 800 + 648) / 100)
    many = target_floor(TARGET, ONE, batch=4, length=10, tokens=100)
    assert many.seconds == pytest.approx(2 * 1000 * 400 / 10_000 + 4 * 40 * 100 * 20 / 10_000 + 6.48)
    plain = target_floor(TARGET, ONE, batch=4, length=10)
    assert plain.state_bytes == 4 * (2 * 50 + 2 * 3)


def test_a_window_s_tokens_choose_experts_as_so_many_rows_do() -> None:
    shape = Shape(dense=0, expert=7, experts=16, experts_per_token=2, kv=entries(1, 0))
    one = target_floor(shape, ONE, batch=1, length=1, tokens=4)
    assert one.weight_bytes == target_floor(shape, ONE, batch=4, length=1).weight_bytes
    assert one.weight_bytes == pytest.approx(2 * 7 * 16 * (1 - (7 / 8) ** 4))


def test_a_chain_reads_its_layer_and_head_once_a_guess() -> None:
    floor = drafter_floor(CHAIN, ONE, batch=4, length=10, guesses=3)
    assert floor.weight_bytes == 2 * (3 * (130 + 200) + 30 + 40)
    assert floor.kv_bytes == 3 * 2 * 40 * 2 * 5
    assert floor.flop == 3 * (2 * 330 * 4 + 4 * 40 * 20) + 2 * 70 * 4 * 4
    assert floor.seconds == pytest.approx((2120 + 2400) / 100)
    shared = drafter_floor(CHAIN, TWO, batch=4, length=10, guesses=3)
    assert shared.weight_bytes == 2 * (3 * (65 + 100) + 30 + 20), "every rank has the whole projection"
    assert shared.kv_bytes == 1200


def test_a_block_reads_its_layers_and_the_head_once() -> None:
    """Its four tokens go through the layers, three of them through the head; one of two layers sees four tokens."""
    floor = drafter_floor(BLOCK, ONE, batch=4, length=10, guesses=3)
    assert floor.weight_bytes == 2 * (100 + 200 + 30 + 40)
    assert floor.kv_bytes == 2 * 4 * (10 + 4) * 2 * 5
    assert floor.flop == 2 * 100 * 16 + 2 * 200 * 12 + 4 * 56 * 4 * 20 + 2 * 70 * 16


def test_a_drafter_s_experts_lie_within_a_group() -> None:
    shape = DrafterShape(dense=0, head=0, shown=0, kv=entries(1, 0), expert=7, experts=16, experts_per_token=2)
    groups = Ceilings(ranks=4, value_bytes=2, bytes_per_s=100.0, flop_per_s=1e9, groups=2)
    floor = drafter_floor(shape, groups, batch=2000, length=1, guesses=3)
    assert floor.weight_bytes == pytest.approx(3 * 2 * 7 * 8), "all of a rank's eight, once a guess"


def test_a_round_is_verification_and_drafter_and_a_tree_verifies_its_nodes() -> None:
    given: dict[str, Any] = {"batch": 4, "length": 10, "guesses": 3}
    chain = round_floor(TARGET, CHAIN, ONE, **given)
    assert chain.seconds == pytest.approx((2000 + 800 + (3 * 50 + 12) * 4 + 2120 + 2400) / 100)
    assert chain.bytes == 2000 + 800 + 648 + 2120 + 2400
    assert round_floor(TARGET, None, ONE, **given) == target_floor(TARGET, ONE, batch=4, length=10, tokens=4)
    tree = round_floor(TARGET, BLOCK, ONE, tree=32, **given)
    assert tree.flop - round_floor(TARGET, BLOCK, ONE, **given).flop == 28 * 4 * (2 * 1000 + 4 * 10 * 20)


def values_of(draft: torch.nn.Module) -> int:
    return sum(p.numel() for p in draft.parameters())


def on_meta(make: Any, config: Any, **options: Any) -> int:
    with torch.device("meta"):
        return values_of(make(config, ModelContext(SingleRank(), reference_kernels(), torch.bfloat16), **options))


@pytest.mark.parametrize(
    ("model", "make"),
    [
        ("qwen3.5-27b", MTPDraft),
        ("qwen3.5-35b-a3b", MTPDraft),
        ("qwen3-next-80b-a3b", MTPDraft),
        ("nemotron-3-nano-30b-a3b", BlocksDraft),
    ],
)
def test_a_model_s_own_layer_has_the_values_that_it_allocates(model: str, make: Any) -> None:
    config = MTPConfig.of_target(config_from_folder(SHAPES / model))
    shape = shape_of(config, 100)
    assert shape.dense + shape.expert * shape.experts == pytest.approx(on_meta(make, config), rel=1e-3)
    assert shape.head == 100 * config.model.hidden_size


def test_drafters_beside_the_8b_shape_have_the_values_that_they_allocate() -> None:
    beside = SHAPES / "qwen3-8b"
    mtp, dflash = MTPConfig.from_folder(beside / "mtp"), DFlashConfig.from_folder(beside / "dflash")
    eagle = Eagle3Config.from_folder(beside / "eagle3")
    first, second, third = (shape_of(config, 1) for config in (mtp, dflash, eagle))
    assert first.dense == pytest.approx(on_meta(MTPDraft, mtp), rel=1e-3)
    entries = 5 * 4096 * 2 * 8 * 128  # which are weights of its layers
    assert second.shown - entries + second.dense == pytest.approx(on_meta(DFlashDraft, dflash), rel=1e-3)
    allocated = on_meta(Eagle3Draft, eagle, own_embedding=False)
    assert third.shown_whole + third.dense == pytest.approx(allocated, rel=1e-3)
    assert (second.shown, second.shown_whole) == (5 * 4096 * 4096 + entries, 0), "every rank has a share of all of it"
    entry = 4096 * 2 * 8 * 128
    assert (first.shown, third.shown) == (2 * 4096 * 4096 + entry, 2 * entry)


def test_the_head_has_the_ids_that_are_asked_for() -> None:
    target = config_from_folder(SHAPES / "qwen3-8b")
    for name, changes, ids in (
        ("mtp", {}, 151_936),
        ("mtp", {"token_map": 32_768}, 32_768),
        ("eagle3", {}, 32_000),
    ):
        keys = {"method": name, "model": str(SHAPES / "qwen3-8b" / name), "num_speculative_tokens": 3, **changes}
        config = speculative_config(keys)
        assert config is not None
        shape = drafter_shape(config, target)
        assert shape is not None
        assert shape.head == ids * 4096
    ngram = speculative_config({"method": "ngram", "num_speculative_tokens": 3})
    assert ngram is not None
    assert drafter_shape(ngram, target) is None


def test_sliding_layers_see_their_window() -> None:
    config = dflash_config(layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    assert shape_of(DFlashConfig.from_dict(config), 1).views == (6, None)
