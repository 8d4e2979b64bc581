"""A world that is only planned: what is checked of it, and that the checks bite."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.bench.options import BenchCommand
from launch.sweep.command import run as run_sweep
from launch.sweep.options import SweepCommand, SweepOptions
from launch.sweep.world import Part, check_coverage, coordinates, jobs_text, plan_part, room_text
from models.cache_layout import CacheLayout, SlotState
from models.config import ModelConfig
from models.quantization import read_quantization
from models.registry import ARCHITECTURES, config_from_dict, config_from_folder
from parallel.layers.shard import HeadShard, Shard, VocabShard
from parallel.topology import ParallelDegrees
from tests.launch.api.parsed import parsed
from tests.models import toy_hybrid
from tests.models.tiny_checkpoint import TINY

ROOT = Path(__file__).resolve().parents[3]


def config_of(shape: str, layers: int = 2) -> ModelConfig:
    """A model that comes with Lockstride, with fewer of its layers."""
    folder = ROOT / "models" / shape
    config = config_from_folder(folder if folder.is_dir() else ROOT / "models" / "shapes" / shape)
    experts = config.experts
    fewer = None if experts is None else replace(experts, layers=tuple(n for n in experts.layers if n < layers))
    return replace(config, layers=layers, experts=fewer, blocks=config.blocks[:layers])


def parts_of(config: ModelConfig, sharing: ParallelDegrees) -> dict[tuple[int, int], Part]:
    return {place: plan_part(config, torch.bfloat16, sharing, place) for place in sorted(set(coordinates(sharing)))}


def errors_of(config: ModelConfig, sharing: ParallelDegrees) -> tuple[str, ...]:
    return check_coverage(sharing, parts_of(config, sharing)).errors


# ---- shards ----


@pytest.mark.parametrize(
    ("shape", "world", "tensor", "expert"),
    [
        ("qwen3-8b", 1024, 8, 1),
        ("qwen3-8b", 96, 32, 1),  # more ranks than key/value heads: these are copied
        ("qwen3-0.6b", 16, 16, 1),  # the vocabulary has padding rows
        ("qwen3-30b-a3b", 64, 4, 1),
        ("qwen3-30b-a3b", 64, 8, 8),
        ("qwen3-30b-a3b", 64, 2, 16),  # groups that share experts
        ("qwen3-8b", 1, 1, 1),
        ("demo/hybrid", 4, 4, 1),  # of one checkpoint tensor, value heads are split and key heads are copied
        ("nemotron-3-nano-30b-a3b", 16, 16, 1),  # as groups of Mamba-2 are
    ],
)
def test_every_element_is_where_it_belongs(shape: str, world: int, tensor: int, expert: int) -> None:
    sharing = ParallelDegrees(world, tensor, expert)
    parts = parts_of(config_of(shape), sharing)
    coverage = check_coverage(sharing, parts)
    assert coverage.errors == ()
    assert coverage.split + coverage.copied == coverage.tensors
    assert len(parts) == max(tensor, expert)
    assert len(coordinates(sharing)) == world


def test_bytes_of_a_rank() -> None:
    config = config_of("qwen3-8b")
    (whole,) = parts_of(config, ParallelDegrees()).values()
    expected = 2 * (2 * config.vocab_size * config.hidden_size + config.hidden_size)
    expected += (
        2
        * config.layers
        * (
            config.hidden_size * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
            + 3 * config.hidden_size * config.intermediate_size
            + 2 * config.hidden_size
            + 2 * config.head_dim
        )
    )
    assert whole.weight_bytes == expected
    assert whole.cache_layout.bytes_per_token == 2 * config.layers * config.kv_heads * config.head_dim * 2
    eighth = parts_of(config, ParallelDegrees(8, 8))[0, 0]
    assert expected / 8 < eighth.weight_bytes < expected / 8 * 1.01
    assert eighth.cache_layout.bytes_per_token == whole.cache_layout.bytes_per_token / 8


def test_bytes_of_fp8_weights_and_their_scales() -> None:
    config = config_of("qwen3-8b-fp8")
    (whole,) = parts_of(config, ParallelDegrees()).values()
    (numbers,) = parts_of(config_of("qwen3-8b"), ParallelDegrees()).values()
    heads = config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    codes = config.layers * config.hidden_size * (heads + 3 * config.intermediate_size)
    assert whole.weight_bytes == numbers.weight_bytes - codes + codes * 4 // 128**2


def test_bytes_of_four_bit_weights_and_their_scales() -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    config = config_of("qwen3-8b")
    four = replace(config, quantization=read_quantization({"quantization_config": awq}))
    (whole,), (numbers,) = (parts_of(one, ParallelDegrees()).values() for one in (four, config))
    heads = config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    codes = config.layers * config.hidden_size * (heads + 3 * config.intermediate_size)
    assert whole.weight_bytes == numbers.weight_bytes - 2 * codes + codes // 2 + codes * 3 // 128
    assert not errors_of(four, ParallelDegrees(4, 4))


def test_state_of_slots_is_taken_from_the_room_for_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, toy_hybrid.ARCHITECTURE, toy_hybrid.ToyHybrid)
    config = config_from_dict({**TINY, **toy_hybrid.HYBRID})  # sums in float32 and two numbers of each, twice
    parts = list(parts_of(config, ParallelDegrees(2, 2)).values())
    slot = 2 * 2 * config.hidden_size // 2 * 4
    (token,) = {part.cache_layout.bytes_per_token for part in parts}
    held = max(part.weight_bytes + part.table_bytes for part in parts)

    def room(kv_tokens: int, slots: int) -> str:
        gib = (held + 5 * slot + kv_tokens * token) / 2**30
        return room_text(parts, SweepOptions(memory_gib=gib, memory_fraction=1.0, max_num_seqs=slots - 2))

    assert "state of 4 slots" in room(1000, slots=4)
    assert f"KV {token} bytes a token, room for 1,000 tokens" in room(1000, slots=4)
    assert f"room for {(1000 * token - 3 * slot) // token:,} tokens" in room(1000, slots=7)
    assert "TOO LARGE" in room(0, slots=4)
    assert "TOO LARGE" in room(3, slots=4 + 3 * token // slot + 1)


def test_a_model_without_kv_needs_room_for_its_state_only() -> None:
    state = SlotState({"sum": ((1 << 20,), torch.float32)})
    part = Part(1 << 20, 0, CacheLayout((state, None)), {}, {}, ())
    fits = SweepOptions(memory_gib=1.0, memory_fraction=1.0, max_num_seqs=226)  # 226 + 28 + 1 slots of 4 MiB, and 1 MiB
    assert "no KV; fits in 1 of 1 GiB" in room_text([part], fits)
    assert "TOO LARGE for 1 of 1 GiB" in room_text([part], replace(fits, max_num_seqs=227))


def test_a_head_that_nobody_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadShard, "first_head", property(lambda self: self.rank // 2 * 2 * self.local_heads))
    errors = errors_of(config_of("qwen3-8b"), ParallelDegrees(4, 4))
    assert any("q_proj" in error and "elements" in error for error in errors), errors


def test_a_key_value_head_that_is_copied_unevenly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadShard, "first_kv_head", property(lambda self: max(0, self.rank - 1) * 8 // self.size))
    errors = errors_of(config_of("qwen3-8b"), ParallelDegrees(16, 16))
    assert any("k_proj" in error and "held by 1 ranks, some by 3" in error for error in errors), errors


def test_a_part_of_a_fused_tensor_that_is_copied_unevenly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadShard, "first_kv_head", property(lambda self: int(self.rank > 0)))
    errors = errors_of(config_of("demo/hybrid"), ParallelDegrees(4, 4))
    assert any("in_proj_qkv" in error and "held by 1 ranks, some by 3" in error for error in errors), errors


def test_a_vocabulary_that_overlaps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VocabShard, "start", property(lambda self: max(0, self.rank * self.width - 1)))
    assert any("embed_tokens" in error for error in errors_of(config_of("qwen3-8b"), ParallelDegrees(4, 4)))


def test_a_parameter_that_is_not_filled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    along_rows = Shard.__init__

    def short(
        self: Shard, full_shape: tuple[int, ...], ranges: tuple[slice, ...], target: torch.Tensor, *more: float
    ) -> None:
        along_rows(self, full_shape, ranges, target[:-1] if target.shape[0] == 4096 else target, *more)

    monkeypatch.setattr(Shard, "__init__", short)
    errors = errors_of(config_of("qwen3-8b"), ParallelDegrees(2, 2))
    assert any("parameter layers.0.mixer.output.weight: filled up to element" in error for error in errors), errors


def test_a_group_with_one_part_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelDegrees, "tensor_group", lambda self, rank: (rank, rank))
    errors = errors_of(config_of("qwen3-8b"), ParallelDegrees(4, 2))
    assert "rank 1: its tensor-parallel group has the shards [1, 1]" in errors


# ---- the command ----


def test_a_world_is_planned_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = "sweep plan --dry-run-world 32 --model models/demo --tp 2 --memory-gib 1"
    assert run_sweep(parsed(SweepCommand, line.split()), {}) == 0
    lines = {text.split()[0]: text for text in capsys.readouterr().out.splitlines()}
    assert lines["world"].endswith("32 ranks on 4 node(s) of 8")
    assert "16 replica(s) x tp 2" in lines["model"]
    assert lines["jobs"].endswith("16 of 2 rank(s): --tensor-parallel-size 2")
    assert "2 different parts over 32 ranks: each element where it belongs" in lines["shards"]
    assert "tokens in 0.9 of 1 GiB" in lines["memory"]
    assert lines["checks"].endswith("all passed")


def test_a_world_of_eight_bits_needs_half_of_the_room(capsys: pytest.CaptureFixture[str]) -> None:
    line = "sweep plan --dry-run-world 1 --model qwen3-8b --memory-gib 139"
    told = []
    for more in ("", " --quantization fp8 --kv-cache-dtype fp8"):
        assert run_sweep(parsed(SweepCommand, (line + more).split()), {}) == 0
        memory = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("memory"))
        numbers = re.search(r"weights ([\d.]+) GiB.*KV ([\d,]+) bytes", memory)
        assert numbers is not None
        told.append((float(numbers[1]), int(numbers[2].replace(",", ""))))
    (wide, kv), (narrow, kv_codes) = told
    assert 2 * kv_codes == kv
    assert 0.5 < narrow / wide < 0.6, "embeddings and head stay"


@pytest.mark.parametrize(
    ("sharing", "jobs"),
    [
        (ParallelDegrees(8, 4, 1), "2 of 4 rank(s): --tensor-parallel-size 4"),
        (ParallelDegrees(8, 4, 4), "2 of 4 rank(s): --tensor-parallel-size 4 --expert-parallel"),
        (ParallelDegrees(8, 2, 8), "1 of 8 rank(s): --tensor-parallel-size 2 --data-parallel-size 4"),
        (ParallelDegrees(8, 1, 4), "2 of 4 rank(s): --tensor-parallel-size 1 --data-parallel-size 4"),
    ],
)
def test_a_plan_says_how_its_jobs_are_started(sharing: ParallelDegrees, jobs: str) -> None:
    assert jobs_text(sharing) == jobs
    flags = jobs.partition(": ")[2].split()
    command = parsed(BenchCommand, ["bench", "latency", "--model", "m", *flags])
    config = replace(command, engine={"device": "cpu", **command.engine}).engine_config(sharing.tensor)
    assert config.ranks == max(sharing.tensor, sharing.expert)
    assert config.expert_parallel is (sharing.expert > 1)


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    line = "sweep plan --dry-run-world 8 --model qwen3-32b --tp 1 --memory-gib 40"
    assert run_sweep(parsed(SweepCommand, line.split()), {}) == 0
    assert "TOO LARGE for 0.9 of 40 GiB" in capsys.readouterr().out


def test_a_failed_check_is_told_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(VocabShard, "start", property(lambda self: max(0, self.rank * self.width - 1)))
    line = "sweep plan --dry-run-world 2 --model models/demo"
    assert run_sweep(parsed(SweepCommand, line.split()), {}) == 1
    told = capsys.readouterr()
    assert "FAILED" in told.out
    assert "wrong: tensor model.embed_tokens.weight" in told.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--dry-run-world 8", "name a model to plan"),
        ("--dry-run-world 12 --model qwen3-8b", "--dry-run-world 12 does not fill nodes of --gpus-per-node 8"),
        ("--dry-run-world 131072 --model qwen3-8b", "control records have room for"),
        ("--dry-run-world 8 --model nowhere", "--model nowhere: "),
        ("--dry-run-world 8 --model qwen3-8b --tp 3", "degree 3 does not divide 8 ranks: choose from [1, 2, 4, 8]"),
        ("--dry-run-world 64 --model qwen3-8b --tp 64", "cannot be split over 64 tensor-parallel ranks"),
        ("--dry-run-world 8 --model qwen3-8b --ep 8", "qwen3-8b has no experts"),
        ("--dry-run-world 8 --model qwen3-30b-a3b --tp 4 --ep 2", "--ep 2 is less than --tp 4"),
        ("--dry-run-world 8 --model qwen3-8b --dtype int4", "--dtype int4 is none of auto, bfloat16"),
    ],
)
def test_a_world_that_cannot_be_is_refused(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep(parsed(SweepCommand, ["sweep", "plan", *line.split()]), {}) == 2
    assert words in capsys.readouterr().err
