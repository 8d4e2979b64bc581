"""The strict loader: what it accepts, what it refuses and how it says so, and how much memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint import WeightsError, locate_tensors
from models.config import ModelConfig
from models.layers.decoder import Decoder
from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from tests.models.tiny_checkpoint import TINY, RankOf, build, full_tensors, write, write_index
from tests.plant import reference_kernels

CONFIG = config_from_dict(TINY)
TIED = config_from_dict({**TINY, "tie_word_embeddings": True})
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return full_tensors(CONFIG)


def load(folder: Path, config: ModelConfig = CONFIG, dtype: torch.dtype | None = None) -> Decoder:
    return load_model(config, folder, dtype=dtype, collectives=SingleRank(), kernels=reference_kernels())


def refusal(folder: Path, config: ModelConfig = CONFIG, dtype: torch.dtype | None = None) -> str:
    with pytest.raises(WeightsError) as caught:
        load(folder, config, dtype)
    return str(caught.value)


def test_every_rank_reads_its_piece_of_every_tensor(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write(tmp_path, tensors, files=3)
    for size in (1, 2, 4):
        for rank in range(size):
            model = load_model(CONFIG, tmp_path, collectives=RankOf(rank, size), kernels=reference_kernels())
            for name, shard in model.checkpoint_shards().items():
                for piece in shard.pieces:
                    assert torch.equal(piece.target, tensors[name][piece.ranges]), name


def test_progress_counts_each_tensor_once(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write(tmp_path, tensors, files=2)
    seen: list[tuple[int, int]] = []
    load_model(
        CONFIG,
        tmp_path,
        collectives=SingleRank(),
        kernels=reference_kernels(),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(n, len(tensors)) for n in range(1, len(tensors) + 1)]


def test_float_dtypes_are_converted(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    mixed = {name: t.to(torch.bfloat16) if "proj" in name else t.double() for name, t in tensors.items()}
    write(tmp_path, mixed)
    model = load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    (piece,) = model.checkpoint_shards()[DOWN].pieces
    assert torch.equal(piece.target, tensors[DOWN].to(torch.bfloat16))


def test_values_beyond_float16_are_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors[DOWN][3, 5] = 1e6
    write(tmp_path, tensors)
    assert DOWN in refusal(tmp_path, dtype=torch.float16)
    load(tmp_path, dtype=torch.bfloat16)


def test_missing_tensor(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    del tensors[DOWN]
    write(tmp_path, tensors)
    message = refusal(tmp_path)
    assert repr(DOWN) in message
    assert "model.safetensors" in message


def test_unexpected_tensor(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write(tmp_path, {**tensors, "model.layers.2.mlp.down_proj.weight": tensors[DOWN].clone()})
    message = refusal(tmp_path)
    assert "'model.layers.2.mlp.down_proj.weight'" in message
    assert "model.safetensors" in message


def test_wrong_shape(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].t().contiguous()
    write(tmp_path, tensors)
    message = refusal(tmp_path)
    assert repr(DOWN) in message
    assert "[40, 24]" in message
    assert "[24, 40]" in message


def test_wrong_dtype(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].to(torch.int8)
    write(tmp_path, tensors)
    message = refusal(tmp_path)
    assert repr(DOWN) in message
    assert "I8" in message


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(tmp_path: Path, tensors: dict[str, Tensor], keep: int) -> None:
    write(tmp_path, tensors)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert str(file) in refusal(tmp_path)


@pytest.mark.parametrize("stale", [torch.zeros(3, 5), torch.zeros(2, dtype=torch.int8)])
def test_a_copy_in_another_file_than_the_index_names_is_not_looked_at(
    tmp_path: Path, tensors: dict[str, Tensor], stale: Tensor
) -> None:
    """Whatever it is: in the first file or the last one."""
    for wanted in (DOWN, next(iter(tensors))):
        weight_map = write(tmp_path, tensors, files=3)
        for file in {*weight_map.values()} - {weight_map[wanted]}:
            others = {key: tensors[key] for key, name in weight_map.items() if name == file}
            save_file({**others, wanted: stale}, tmp_path / file)
        assert locate_tensors(tmp_path) == {key: tmp_path / name for key, name in weight_map.items()}
        assert torch.equal(load(tmp_path).layers[1].mlp.down.weight.data, tensors[DOWN])  # type: ignore[union-attr,arg-type]


def test_index_and_files_must_agree(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    weight_map = write(tmp_path, tensors, files=2)
    other = next(name for name in weight_map.values() if name != weight_map[DOWN])
    write_index(tmp_path, {**weight_map, DOWN: other})
    assert repr(DOWN) in refusal(tmp_path)
    write_index(tmp_path, {key: name for key, name in weight_map.items() if key != DOWN})
    assert repr(DOWN) in refusal(tmp_path)
    write_index(tmp_path, {**weight_map, "ghost": other})
    assert "'ghost'" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "no 'weight_map'"),
        ('{"weight_map": {}}', "no 'weight_map'"),
        ('{"weight_map": {"a": 3}}', "gives 3"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' appears twice"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "'absent.safetensors' is missing"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "leads out of the model folder"),
        ('{"weight_map": {"a": "/dev/zero"}}', "leads out of the model folder"),
        ('{"weight_map": {"a": "link.safetensors"}}', "leads out of the model folder"),
    ],
)
def test_bad_index(tmp_path: Path, tensors: dict[str, Tensor], text: str, reason: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, tensors, files=2)
    (folder / "model-00001-of-00002.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to("../outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    message = refusal(folder)
    assert str(folder) in message
    assert reason in message


def test_single_file_that_links_out_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, tensors)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert "leads out of the model folder" in refusal(folder)


def test_hugging_face_cache_layout_is_accepted(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    folder, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    write(folder, tensors)
    (folder / "model.safetensors").rename(blobs / "0123")
    (folder / "model.safetensors").symlink_to("../../blobs/0123")
    load(folder)


def test_no_weights_and_ambiguous_weights(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    message = refusal(tmp_path)
    assert "--load-format dummy" in message
    write(tmp_path, tensors)
    write(tmp_path, tensors, files=2)
    assert "out of date" in refusal(tmp_path)


def test_tied_head_may_be_stored_twice_but_must_be_equal(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    embedding = tensors["model.embed_tokens.weight"]
    write(tmp_path, {**tensors, "lm_head.weight": embedding.clone()})
    assert torch.equal(load(tmp_path, TIED).lm_head.weight.data, embedding)
    del tensors["lm_head.weight"]
    write(tmp_path, tensors)
    assert torch.equal(load(tmp_path, TIED).lm_head.weight.data, embedding)
    write(tmp_path, {**tensors, "lm_head.weight": embedding + 1})
    assert "'lm_head.weight' differs from the embedding" in refusal(tmp_path, TIED)


def test_recomputed_buffers_of_old_checkpoints_are_ignored(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write(tmp_path, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)})
    load(tmp_path)


def test_nothing_is_allocated_before_the_check(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """A config that asks for 200 GB meets its checkpoint's real shapes first."""
    write(tmp_path, tensors)
    huge = config_from_dict({**TINY, "vocab_size": 2**31 - 1})
    assert "'lm_head.weight' has shape [37, 24]" in refusal(tmp_path, huge)


def test_unknown_load_format_and_absent_folder() -> None:
    def attempt(load_format: str) -> None:
        load_model(CONFIG, None, load_format=load_format, collectives=SingleRank(), kernels=reference_kernels())

    with pytest.raises(ValueError, match="'pt' is unknown; use one of safetensors, dummy"):
        attempt("pt")
    with pytest.raises(ValueError, match="needs a model folder"):
        attempt("safetensors")


CODED = ("fp8", "at-load", "mxfp4")
MEASURE = """
import sys
import torch
torch.set_num_threads(1)
from models import weights
from models.fp8_load import quantised_at_load
from models.registry import config_from_folder
from parallel.comm.collectives import SingleRank
from parallel.layers.weight import Weight
from tests.plant import reference_kernels

def memory(key):
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) << 10

def load(folder):
    config = quantised_at_load(config_from_folder(folder), sys.argv[3] or None)
    return weights.load_model(
        config, folder, dtype=torch.bfloat16, collectives=SingleRank(), kernels=reference_kernels()
    )

weights.MAPPED_BYTES = 16 << 20
load(sys.argv[1])  # imports and allocator warm
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # reset the high-water mark
model = load(sys.argv[2])
found = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Weight))
held = [*model.parameters(), *(weight.scale for weight in found if weight.scale is not None)]
print(memory("VmHWM") - before - sum(p.numel() * p.itemsize for p in held))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.multiprocess
@pytest.mark.parametrize("stored", ["float32", *(pytest.param(one, marks=pytest.mark.long) for one in CODED)])
def test_peak_memory_does_not_grow_with_the_checkpoint(stored: str, tmp_path: Path) -> None:
    """256 MiB of float32 become 128 MiB of bfloat16, or 64 MiB of FP8 codes, and 200 MiB of codes stay as they are,
    with less than 64 MiB beside the parameters themselves.

    The promise is the largest tensor plus 1 GiB; a mapping window of 16 MiB instead of 256 shows the same in small.
    """
    wide = {**TINY, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 256, "num_hidden_layers": 6}
    if stored == "mxfp4":
        wide |= {"architectures": ["GptOssForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2}
        wide |= {"num_hidden_layers": 13}
        wide["quantization_config"] = {"quant_method": "mxfp4"}
    if stored == "fp8":
        blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        wide |= {"num_hidden_layers": 24, "quantization_config": blocks}
    large, small = tmp_path / "large", tmp_path / "small"
    for folder, config in ((large, wide), (small, {**wide, "num_hidden_layers": 1})):
        folder.mkdir()
        write(folder, _zeros(config, stored), files=3 if stored in ("fp8", "at-load") else 1, config=config)
    assert sum(file.stat().st_size for file in large.glob("*.safetensors")) > 200 << 20
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large), "fp8" if stored == "at-load" else ""],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    print(int(child.stdout) / 2**20)
    assert int(child.stdout) < 64 << 20


def _zeros(config: dict[str, Any], stored: str) -> dict[str, Tensor]:
    """A checkpoint of zeros; codes with scales of 1."""
    found: dict[str, Tensor] = {}
    for name, shard in build(config_from_dict(config), device="meta").checkpoint_shards().items():
        shape = shard.full_shape
        if stored == "fp8" and "_proj.weight" in name:
            found[name] = torch.zeros(shape, dtype=torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = torch.ones(shape[0] // 128, shape[1] // 128)
        elif len(shape) == 3:
            experts, columns, rows = shape
            found[f"{name}_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
            found[f"{name}_scales"] = torch.full((experts, rows, columns // 32), 127, dtype=torch.uint8)
        else:
            found[name] = torch.zeros(shape)
    return found
