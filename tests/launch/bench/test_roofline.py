"""The floor of a decode step against independently published figures, and the shapes that they are for."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.bench.options import H200_BYTES_PER_S, H200_FLOP_PER_S
from launch.bench.roofline import Shape, decode_floor
from launch.bench.session import SHAPES
from models.kv_group import KvGroup, Plane
from models.registry import config_from_dict, config_from_folder
from tests.models.tiny_checkpoint import TINY, build
from tests.models.tiny_families import FAMILIES

PEERS = json.loads((Path(__file__).parents[3] / "docs" / "peers.json").read_text())
FOLDERS = {"8B": "qwen3-8b", "0.6B": "qwen3-0.6b", "30B-A3B": "qwen3-30b-a3b"}


def entries(heads: int, dim: int) -> KvGroup:
    """One plane in one layer, bfloat16."""
    return KvGroup((0,), (Plane("latent", heads, dim, torch.bfloat16),), 1)


def floor_ms(shape: Shape, batch: int, ranks: int, length: float = 640) -> float:
    """As peers.json says that its floors were made."""
    floor = decode_floor(
        shape,
        batch=batch,
        length=length,
        ranks=ranks,
        value_bytes=2,
        bytes_per_s=H200_BYTES_PER_S,
        flop_per_s=H200_FLOP_PER_S,
    )
    return floor.seconds * 1e3


@pytest.mark.parametrize(
    ("model", "tp", "batch", "expected"),
    [
        (result["model"], result["tp"], int(batch), expected)
        for result in PEERS["results"]
        for batch, expected in result["roofline_floor_ms"].items()
    ],
)
def test_floors_are_those_of_the_peers_file(model: str, tp: int, batch: int, expected: float) -> None:
    """Within 3 %, or within what was lost when the figure was rounded to the digits that it has."""
    rounding = 0.5 * 10.0 ** -len(str(expected).partition(".")[2])
    found = floor_ms(Shape.from_folder(SHAPES / FOLDERS[model]), batch, tp)
    assert found == pytest.approx(expected, rel=0.03, abs=rounding)


@pytest.mark.parametrize("model", sorted(FOLDERS))
def test_shape_folders_are_the_peers_models(model: str) -> None:
    config: dict[str, Any] = json.loads((SHAPES / FOLDERS[model] / "config.json").read_text())
    assert config | PEERS["models"][model] == config


def test_the_32b_shape_has_its_size() -> None:
    shape = Shape.from_folder(SHAPES / "qwen3-32b")
    config = config_from_folder(SHAPES / "qwen3-32b")
    embedding = config.vocab_size * config.hidden_size
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads) == (64, 5120, 64, 8)
    assert shape.dense + embedding == pytest.approx(32.8e9, rel=0.005)


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in SHAPES.glob("*/config.json")))
def test_every_shape_is_a_model_folder(folder: str) -> None:
    config = config_from_folder(SHAPES / folder)
    assert config.max_length >= 4096
    vocabularies = {"nemotron": 131_072, "qwen3.5": 248_320, "glm": 151_552, "minimax": 200_064, "mistral": 131_072}
    vocabularies |= {"gpt": 201_088, "gemma": 262_208, "gemma-4-26b-a4b": 262_144}
    assert config.vocab_size == vocabularies.get(folder, vocabularies.get(folder.partition("-")[0], 151_936))


@pytest.mark.parametrize(
    ("folder", "billions", "active"),
    [
        ("glm-4.5-air", 106.9, 13.4),
        ("gpt-oss-20b", 20.9, 4.19),
        ("glm-4.5-355b-a32b", 352.8, 33.6),
        ("minimax-m2-230b-a10b", 228.7, 11.0),
        ("gemma-3-27b", 27.01, 27.01),
        ("gemma-4-26b-a4b", 25.23, 3.81),
        ("mistral-nemo-12b", 12.25, 12.25),
        ("mistral-small-24b", 23.57, 23.57),
        ("qwen3-next-80b-a3b", 79.7, 3.9),
        ("qwen3.5-27b", 26.9, 26.9),
        ("qwen3.5-35b-a3b", 34.7, 3.5),
        ("nemotron-3-nano-30b-a3b", 31.58, 3.58),
    ],
)
def test_hybrid_shapes_have_their_sizes_and_states(folder: str, billions: float, active: float) -> None:
    """Against what a model of that shape allocates, whose norms and filters the floor leaves out."""
    shape, config = Shape.from_folder(SHAPES / folder), config_from_folder(SHAPES / folder)
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    model = build(config, device="meta")
    total = shape.dense + shape.expert * shape.experts + embedding
    assert total == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-3)
    assert total == pytest.approx(billions * 1e9, rel=2e-3)
    assert shape.dense + shape.expert * shape.experts_per_token + embedding == pytest.approx(active * 1e9, rel=0.02)
    layout = model.cache_layout
    assert shape.state_bytes + 4 * shape.window_values == layout.bytes_per_slot
    entries = sum(kv.bytes_per_token for kv in (shape.kv, *(kv for kv, _ in shape.more)))
    assert 2 * entries == layout.bytes_per_token, "bfloat16, and float32"


def test_layers_with_a_window_read_that_many_keys() -> None:
    """gpt-oss: half of its layers see 128 tokens. Gemma 4: full layers with heads of another size."""
    shape = Shape.from_folder(SHAPES / "gpt-oss-20b")
    floor = partial(decode_floor, batch=2, ranks=1, value_bytes=2, bytes_per_s=1e12, flop_per_s=1e15)
    of_token = 12 * 2 * 8 * 64 * 2  # layers, planes, heads, dims, bytes
    assert floor(shape, length=100.0).kv_bytes == 2 * 2 * 100 * of_token
    assert floor(shape, length=1000.0).kv_bytes == 2 * (1000 + 128) * of_token
    for name in ("gemma4", "gemma4-experts"):
        config = config_from_dict(TINY | FAMILIES[name])
        model, shape = build(config, device="meta"), Shape.of(config, torch.float32)
        weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        found = shape.dense + shape.expert * shape.experts + config.vocab_size * config.hidden_size
        assert found == pytest.approx(weights, rel=0.005)
        kv = sum(kv.bytes_per_token for kv in (shape.kv, *(kv for kv, _ in shape.more)))
        assert kv == model.cache_layout.bytes_per_token


def test_state_is_read_and_written() -> None:
    shape = Shape(1000, 0, 0, 0, kv=entries(2, 0), state_bytes=50, window_values=3)
    floor = partial(decode_floor, shape, length=10.0, value_bytes=2, bytes_per_s=100.0, flop_per_s=1e12)
    assert floor(batch=4, ranks=1).state_bytes == 4 * (2 * 50 + 2 * 3)
    assert floor(batch=4, ranks=1).seconds == pytest.approx((2000 + 424) / 100)
    assert floor(batch=4, ranks=2).state_bytes == 212
    assert floor(batch=4, ranks=4, groups=2).state_bytes == 106


def test_a_byte_bound_step_and_a_compute_bound_one() -> None:
    shape = Shape(dense=1000, expert=0, experts=0, experts_per_token=0, kv=entries(2, 5))
    floor = partial(decode_floor, length=10.0, value_bytes=2, bytes_per_s=100.0, flop_per_s=10_000.0)
    one = floor(shape, batch=1, ranks=1)
    assert (one.weight_bytes, one.kv_bytes) == (2000, 2 * 10 * 2 * 5)
    assert one.seconds == pytest.approx(2000 / 100 + 200 / 100)
    many = floor(shape, batch=1000, ranks=1)
    assert many.seconds == pytest.approx(2 * 1000 * 1000 / 10_000 + 200_000 / 100)
    four = floor(shape, batch=1, ranks=4)
    assert four.weight_bytes == 500
    assert four.kv_bytes == 100, "two heads cannot be shared by four ranks"


def test_fp8_weights_are_a_byte_each_and_multiplied_twice_as_fast() -> None:
    shape = Shape(1000, 0, 0, 0, kv=entries(2, 0), kept=200, coded_bytes=1.25)
    floor = partial(decode_floor, shape, length=10.0, ranks=1, value_bytes=2, bytes_per_s=100.0, flop_per_s=10_000.0)
    assert floor(batch=1).weight_bytes == 200 * 2 + 800 * 1.25
    assert floor(batch=1000).seconds == pytest.approx(2 * 1000 * (200 + 800 / 2) / 10_000)
    for option, folder in ((None, "qwen3-8b-fp8"), ("fp8", "qwen3-8b")):
        made = Shape.from_folder(SHAPES / folder, quantization=option)
        assert 1 < made.coded_bytes < 1.001
        assert made.kept == 151936 * 4096


def test_groups_have_rows_of_their_own_and_share_experts() -> None:
    """Four ranks as two groups of two: what is no expert's, for the rows of the fuller group."""
    shape = Shape(dense=1000, expert=7, experts=16, experts_per_token=2, kv=entries(4, 5))
    floor = partial(decode_floor, length=10.0, value_bytes=2, bytes_per_s=100.0, flop_per_s=1e12)
    alone = floor(shape, batch=1000, ranks=4)
    groups = floor(shape, batch=1000, ranks=4, groups=2)
    assert groups.weight_bytes - alone.weight_bytes == pytest.approx(2 * (1000 / 2 - 1000 / 4))
    assert groups.kv_bytes == alone.kv_bytes, "half the rows, twice the heads"
    assert floor(shape, batch=3, ranks=4, groups=2).kv_bytes == 2 * 2 * 10 * 2 * 5


def test_all_experts_are_read_once_many_tokens_ask() -> None:
    shape = Shape(dense=0, expert=7, experts=16, experts_per_token=2, kv=entries(1, 0))
    floor = partial(decode_floor, length=1.0, value_bytes=1, bytes_per_s=1.0, flop_per_s=1e9)
    assert floor(shape, batch=1, ranks=1).weight_bytes == pytest.approx(7 * 2)
    assert floor(shape, batch=10_000, ranks=1).weight_bytes == pytest.approx(7 * 16)
    assert floor(shape, batch=10_000, ranks=2).weight_bytes == pytest.approx(7 * 8)
    assert 7 * 1 < floor(shape, batch=1, ranks=2).weight_bytes < 7 * 2
