"""Checkpoints that rotate pairs of neighbours, (2i, 2i + 1): rows of queries and keys are put in another order at load.

tests/models/test_parity.py has families that always do; here a key asks for it, of any family and format of weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.drafters.draft_config import DFlashConfig
from models.drafters.load import load_dflash
from models.layers.decoder import Decoder
from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from tests.models import quantised, quantised4, test_fp8
from tests.models.drafters.tiny_drafters import dflash_config, dflash_tensors
from tests.models.parity_worker import run_models
from tests.models.test_fp8_at_load import as_codes
from tests.models.test_fp8_at_load import load as load_at
from tests.models.test_parity import DEFAULT, _check_all, _save
from tests.models.tiny_checkpoint import TINY, full_tensors, write
from tests.models.tiny_families import FAMILIES
from tests.plant import reference_kernels

KEY = {"rope_interleave": True}
GLM = TINY | {"architectures": ["GlmForCausalLM"], "head_dim": 16, "hidden_size": 32, "intermediate_size": 64}


def in_halves(rows: Tensor, dim: int, rotated: int) -> Tensor:
    """The formula: of each head of ``dim`` rows, 2i goes to i and 2i + 1 to i + rotated / 2."""
    found = rows.clone()
    for first in range(0, len(rows), dim):
        for i in range(rotated // 2):
            found[first + i], found[first + i + rotated // 2] = rows[first + 2 * i], rows[first + 2 * i + 1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Qwen3", {"head_dim": 14, "attention_bias": True}),  # norms of heads
        ("Olmo2", {"hidden_size": 40, "num_key_value_heads": 4}),  # of all heads
    ],
)
def test_a_key_asks_for_what_transformers_rotates_so(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb  # of neighbours

    given = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_key_value_heads": 2}
    model = _save(tmp_path / "pairs", family, given | {"rope_parameters": DEFAULT} | settings)
    path = tmp_path / "pairs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | KEY))
    (tmp_path / "prompts.json").write_text(json.dumps([[7 * i + j * j for j in range(3 + 2 * i)] for i in range(8)]))
    run_models(tmp_path, SingleRank(), 1)
    module = f"transformers.models.{family.lower()}.modeling_{family.lower()}.apply_rotary_pos_emb"
    monkeypatch.setattr(module, apply_rotary_pos_emb)
    _check_all(tmp_path, {"pairs": model}, 1, 1)


def write_codes(folder: Path, config: dict[str, Any], name: str) -> dict[str, Tensor]:
    """What the codes of the folder mean."""
    tensors = full_tensors(config_from_dict(config))
    kept = ["lm_head", "model.embed_tokens"]
    module: Any = quantised if name in quantised.schemes() else quantised4
    scheme, is_kept = module.schemes()[name], lambda one: one.removesuffix(".weight") in kept
    meant: dict[str, Tensor]
    stored, meant, said = module.quantise(tensors, scheme, is_kept, kept)
    write(folder, stored, files=2, config=config | {"quantization_config": said})
    return meant


@pytest.mark.parametrize("name", ["A", "B", "C", "int4-zeros", "awq", "gptq", "mxfp4"])
def test_scales_move_with_their_rows(name: str, tmp_path: Path) -> None:
    """Half of each head, on whole and on replicated key heads. Blocks of A have 16 rows, which is one head."""
    meant = write_codes(tmp_path, GLM, name)
    for rank, size in ((0, 1), (1, 2), (3, 4)):
        check_qkv(test_fp8.load(tmp_path, rank, size), meant, rank, size)


def check_qkv(model: Decoder, meant: dict[str, Tensor], rank: int, size: int) -> None:
    qkv = dict(test_fp8.weights(model))["layers.1.mixer.qkv.weight"]
    q, k, v = (meant[f"model.layers.1.self_attn.{one}_proj.weight"] for one in "qkv")
    heads, kv_heads = len(q) // 16 // size, max(1, len(k) // 16 // size)
    first, first_kv = rank * heads * 16, rank * (len(k) // 16) // size * 16
    of_keys = slice(first_kv, first_kv + kv_heads * 16)
    queries = in_halves(q, 16, 8)[first : first + heads * 16]
    expected = torch.cat([queries, in_halves(k, 16, 8)[of_keys], v[of_keys]])
    assert torch.equal(qkv.plain(torch.float32), expected)


def test_codes_that_are_made_at_load(tmp_path: Path) -> None:
    tensors = full_tensors(config_from_dict(GLM))
    write(tmp_path, tensors, config=GLM)
    meant = {name: as_codes(tensor) for name, tensor in tensors.items()}
    check_qkv(load_at(tmp_path, 1, 2, option="fp8"), meant, 1, 2)


def test_rows_that_would_leave_their_block_of_scales_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are read; 24 rows a head in blocks of 16."""
    monkeypatch.setattr("models.weights._stream", pytest.fail)
    write_codes(tmp_path, GLM | {"head_dim": 24, "partial_rotary_factor": 1.0}, "A")
    words = "24 of 24 channels of a head are rotated in pairs of neighbours, which lie in several blocks: blocks of 16"
    with pytest.raises(ValueError, match=words):
        test_fp8.load(tmp_path)


def test_keys_that_are_values_are_refused() -> None:
    keys = {"rope_interleave": True, "attention_k_eq_v": True}
    with pytest.raises(ValueError, match="'rope_interleave' is True, which asks for another order of keys"):
        config_from_dict(TINY | FAMILIES["gemma4"] | keys)


def test_drafters(tmp_path: Path) -> None:
    """Rows of keys that DFlash stacks, and norms of heads."""
    target = load_model(
        config_from_dict(TINY), None, load_format="dummy", collectives=SingleRank(), kernels=reference_kernels()
    )
    tensors = dflash_tensors(dflash_config())
    write(tmp_path, tensors, config=dflash_config(**KEY))
    draft = load_dflash(target, DFlashConfig.from_folder(tmp_path), tmp_path)
    assert draft.entries is not None
    mixer: Any = draft.layers[0].mixer
    keys = tensors["layers.0.self_attn.k_proj.weight"]
    assert torch.equal(draft.entries.data[: len(keys)], in_halves(keys, 10, 10))
    norm = tensors["layers.0.self_attn.k_norm.weight"]
    assert torch.equal(mixer.k_norm.weight, in_halves(norm, 10, 10))
