"""EngineConfig: defaults by device, buckets, and errors a user can act on."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import pytest

from models.row_buckets import decode_ladder
from runtime.config import DEVICE_DEFAULTS, ConfigError, EngineConfig
from runtime.schedule.config import StepLimits
from runtime.speculative_config import speculative_config


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fields_left_out_take_the_device_s_default(device: Literal["cpu", "cuda"]) -> None:
    config = EngineConfig(model="m", device=device)
    for name, by_device in DEVICE_DEFAULTS.items():
        assert getattr(config, name) == by_device[device]


def test_auto_device_is_resolved_at_construction() -> None:
    assert EngineConfig(model="m").device in ("cpu", "cuda")


def test_given_values_are_kept_and_derived_ones_follow() -> None:
    config = EngineConfig(model="m", device="cpu", max_num_seqs=5, chain_depth=3)
    assert config.decode_buckets == (1, 2, 4, 5)
    assert not config.serial
    assert dataclasses.replace(config, chain_depth=0).serial


def test_a_row_gains_as_many_tokens_as_are_proposed_and_one_more() -> None:
    assert EngineConfig(model="m", device="cpu").width == 1
    config = EngineConfig(model="m", device="cpu", speculative_method="ngram", num_speculative_tokens=4)
    assert config.width == config.step_limits(64, 2).width == 5
    assert dataclasses.replace(config, chain_depth=0).speculation == config.speculation
    assert dataclasses.replace(config, num_speculative_tokens=4).describe() == config.describe()
    given = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert EngineConfig(model="m", device="cpu", speculative_config=given).speculation == config.speculation


def test_speculation_that_cannot_be_is_refused_by_the_config() -> None:
    with pytest.raises(ConfigError, match=r"says num_speculative_tokens 4, but --num-speculative-tokens 3: leave one"):
        EngineConfig(
            model="m",
            device="cpu",
            speculative_config={"method": "ngram", "num_speculative_tokens": 4},
            num_speculative_tokens=3,
        )
    with pytest.raises(ConfigError, match="names no num_speculative_tokens"):
        EngineConfig(model="m", device="cpu", speculative_method="ngram")


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 9, 32, 100, 256, 1000])
def test_default_buckets_ascend_to_the_slots_and_waste_at_most_half(slots: int) -> None:
    buckets = decode_ladder(slots)
    assert buckets[-1] == slots
    assert list(buckets) == sorted(set(buckets))
    for rows in range(1, slots + 1):
        bucket = next(b for b in buckets if b >= rows)
        assert bucket < 2 * rows or bucket - rows < 32


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("load_format", "pickle", ["load_format", "'pickle'", "--load-format safetensors"]),
        ("dtype", "int8", ["dtype", "'int8'", "--dtype auto"]),
        ("device", "tpu", ["device", "'tpu'", "--device auto"]),
        ("max_num_seqs", 0, ["max_num_seqs", "0", "at least 1", "--max-num-seqs 1"]),
        ("max_num_seqs", -1, ["-1", "at least 1"]),
        ("block_size", True, ["block_size", "True", "--block-size"]),
        ("chain_depth", 65, ["chain_depth", "65", "64", "--chain-depth 64"]),
        ("tensor_parallel", 0, ["tensor_parallel", "--tensor-parallel-size 1"]),
        ("max_prefill_tokens", 0, ["--max-num-batched-tokens 1"]),
        ("max_model_len", 1, ["max_model_len", "at least 2"]),
        ("memory_fraction", 1.5, ["1.5", "(0, 1]", "--memory-fraction 0.9"]),
        ("memory_fraction", float("nan"), ["nan", "--memory-fraction 0.9"]),
        ("control_timeout_s", 0.0, ["0.0", "--control-timeout-s 10"]),
        ("control_timeout_s", float("nan"), ["nan"]),
        ("decode_buckets", (4, 2), ["4,2", "ascend", "--decode-buckets 2,4"]),
        ("decode_buckets", (0, 32), ["0,32", "--decode-buckets 32"]),
        ("decode_buckets", (1, 16), ["16", "max_num_seqs is 32", "--decode-buckets 1,16,32", "--max-num-seqs 16"]),
        ("seed", 2**63, [str(2**63), "--seed"]),
        ("warm", "greedy,random", ["warm is 'greedy,random'", "a list of", "type warm=('greedy', 'random')"]),
        ("warm", ("gready",), ["'gready'", "--warm greedy"]),
        ("data_parallel", 0, ["data_parallel is 0", "--data-parallel-size 1"]),
        ("data_parallel", 1000, ["at most 240", "--data-parallel-size 240"]),
    ],
)
def test_an_impossible_value_is_refused_with_what_to_type(field: str, value: object, words: list[str]) -> None:
    options: dict[str, Any] = {"model": "m", "device": "cpu"} | {field: value}
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**options)
    for word in words:
        assert word in str(refusal.value)


def test_groups_share_whole_experts() -> None:
    assert not EngineConfig(model="m", device="cpu").expert_parallel
    groups = EngineConfig(model="m", device="cpu", tensor_parallel=2, data_parallel=4, max_num_seqs=8)
    assert groups.expert_parallel
    assert (groups.ranks, groups.running_seqs) == (8, 32)
    with pytest.raises(ConfigError, match=r"data_parallel is 2, but expert_parallel is off.*--no-expert-parallel"):
        EngineConfig(model="m", device="cpu", data_parallel=2, expert_parallel=False)
    with pytest.raises(ConfigError, match=r"max_sessions is 4.*--tensor-parallel-size 6 --expert-parallel"):
        EngineConfig(model="m", device="cpu", tensor_parallel=2, data_parallel=3, max_sessions=4)
    drafting = {"method": "mtp", "model": "drafter", "num_speculative_tokens": 3}
    assert EngineConfig(model="m", device="cpu", data_parallel=2, speculative_config=drafting).width == 4
    fewer = drafting | {"fewer_speculative_tokens": [1]}
    with pytest.raises(ConfigError, match=r"fewer_speculative_tokens is \[1\], but data_parallel is 2"):
        EngineConfig(model="m", device="cpu", data_parallel=2, speculative_config=fewer)


def test_smaller_windows_come_unasked_where_they_are_measured() -> None:
    keys: dict[str, object] = {"method": "ngram", "num_speculative_tokens": 15}

    def narrower(device: str, groups: int = 1, **more: object) -> tuple[int, ...]:
        made = EngineConfig(model="m", device=device, data_parallel=groups, speculative_config=keys | more)  # type: ignore[arg-type]
        return made.narrower

    assert EngineConfig(model="m", device="cuda").narrower == ()
    assert narrower("cuda") == (8, 4)
    assert narrower("cpu") == narrower("cuda", 2) == ()
    assert narrower("cpu", fewer_speculative_tokens=[5]) == narrower("cuda", fewer_speculative_tokens=[5]) == (6,)
    assert narrower("cuda", fewer_speculative_tokens=[]) == narrower("cuda", disable_by_batch_size=4) == ()
    assert narrower("cuda", 2, fewer_speculative_tokens=[]) == ()


def test_no_smaller_windows_is_another_configuration_than_none_named() -> None:
    """Ranks that differ in it would capture different graphs. Each is told as one could type it."""
    keys: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 15}
    several: tuple[dict[str, Any], ...] = ({}, {"fewer_speculative_tokens": []}, {"fewer_speculative_tokens": [7, 3]})
    made = [EngineConfig(model="m", device="cuda", speculative_config=keys | more) for more in several]
    assert len({config.describe() for config in made}) == 3
    for config in made:
        again = speculative_config(str(config.speculation))
        assert again == config.speculation


def _few_slots(rows: int) -> int:
    config = EngineConfig(model="m", device="cpu", max_num_seqs=rows)
    return config.with_few_slots(config.step_limits(512, 4)).slots


def test_options_are_the_limits_of_steps() -> None:
    config = EngineConfig(model="m", device="cpu", max_num_seqs=6, block_size=8, chain_depth=3, max_prefill_tokens=99)
    assert config.step_limits(512, 4) == StepLimits(6, 12, 8, 512, depth=3, width=1, max_prefill_tokens=99)
    slots = {rows: _few_slots(rows) for rows in (1, 2, 6, 32, 256)}
    assert slots == {1: 3, 2: 4, 6: 8, 32: 36, 256: 288}
    for option, value in (("max_num_seqs", 65_536), ("block_size", 1025), ("chain_depth", 65), ("max_model_len", 1)):
        with pytest.raises(ConfigError, match=option):
            EngineConfig(model="m", **cast(Any, {option: value}))
