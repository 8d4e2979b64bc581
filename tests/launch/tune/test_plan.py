"""What is measured first, and that nothing that a captured step runs is left out."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from launch.tune.plan import IN_LAYERS_UP_TO, Task, plan
from launch.tune.shapes import RankShare, asked_attention, asked_products, buckets_of
from models.kernels.attention.decode_variant import DecodeShape
from models.kernels.matmul.choice_table import LinearShape
from models.registry import config_from_folder
from models.row_buckets import decode_ladder

SHAPES = Path(__file__).parents[3] / "models" / "shapes"
PARTS = ("products", "attention")
BUCKETS = buckets_of(256, 8192)


@functools.cache
def tasks(model: str = "qwen3-8b", parts: tuple[str, ...] = PARTS) -> tuple[Task, ...]:
    share = RankShare.of(config_from_folder(SHAPES / model), 1)
    return tuple(plan(asked_products(share, BUCKETS, 256), asked_attention(share, 1), 256, parts))


@pytest.mark.parametrize(("model", "layer"), [("qwen3-8b", 4), ("qwen3-0.6b", 4), ("qwen3-30b-a3b", 3)])
def test_every_product_of_every_bucket_is_measured_once(model: str, layer: int) -> None:
    products = [task.what for task in tasks(model) if isinstance(task.what, LinearShape)]
    assert len(set(products)) == len(products) == layer * len(BUCKETS) + len(decode_ladder(256))
    assert {shape.rows for shape in products} == set(BUCKETS)
    assert len({task.key for task in tasks(model)}) == len(tasks(model))


def test_decode_steps_come_first_then_the_buckets_between_then_prompts() -> None:
    order = list(dict.fromkeys(task.rows for task in tasks()))
    assert order[:9] == [1, 8, 32, 128, 256, 64, 16, 2, 4]
    assert order[9:19] == [rows for rows in decode_ladder(256) if rows not in order[:9]]
    assert order[19:24] == [512, 1024, 2048, 4096, 8192]
    assert order[24:27] == [320, 384, 448]


def test_a_steps_largest_weights_come_first() -> None:
    """What is chosen stays in place for the others of the step."""
    first = [task for task in tasks() if task.rows == 32]
    sizes = [task.what.outputs * task.what.inner for task in first if isinstance(task.what, LinearShape)]
    *layers, head = sizes
    assert layers == sorted(layers, reverse=True)
    assert head == 151936 * 4096
    assert first[-1].what == DecodeShape(256, 4, 128, torch.bfloat16)


def test_whole_searches_are_at_powers_of_two_and_layers_up_to_the_largest_decode_step() -> None:
    for task in tasks():
        assert task.whole == (task.rows & (task.rows - 1) == 0)
        head = isinstance(task.what, LinearShape) and task.what.outputs == 151936
        assert task.in_layers == (task.rows <= IN_LAYERS_UP_TO and not head)
        assert task.effort.finalists >= 3


def test_a_model_of_8b_fits_into_a_quarter_of_an_hour() -> None:
    assert 8 < sum(task.estimate for task in tasks()) / 60 < 15


def test_an_estimate_is_what_an_h100_took() -> None:
    """docs/lab/measurements/h100.md: 74 choices of 8B in 426 s."""
    rows = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256}
    measured = [task.estimate for task in tasks() if task.rows in rows]
    assert len(measured) == 74
    assert sum(measured) == pytest.approx(426, rel=0.15)


def test_turns_are_as_long_as_asked() -> None:
    share = RankShare.of(config_from_folder(SHAPES / "qwen3-8b"), 1)
    usual, longer = (plan(asked_products(share, (8, 256, 320), 256), None, 256, PARTS, s) for s in (None, 1.5))
    assert [task.key for task in usual] == [task.key for task in longer]
    assert {task.effort.seconds for task in longer} == {1.5}
    for short, long in zip(usual, longer, strict=True):
        turns = 2 * (short.effort.finalists + 1)
        assert long.estimate == pytest.approx(short.estimate + turns * (1.5 - short.effort.seconds))


def test_parts_are_left_out() -> None:
    assert {task.part for task in tasks(parts=("attention",))} == {"attention"}
    assert {task.part for task in tasks(parts=("products",))} == {"products"}
    assert tasks(parts=("all-reduce",)) == ()
