"""The demo's drafters and hybrid can be trained again: every line, at toy size; what is written is what is served."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from models.demo import train_drafters, train_hybrid
from models.demo.draft_networks import MTP, DFlash, DraftShape
from models.demo.draft_rollouts import Rollouts
from models.demo.hybrid_network import Hybrid, HybridShape, hybrid_mtp
from models.demo.network import Shape
from models.drafters.draft_config import DFlashConfig, MTPConfig
from models.drafters.load import load_dflash, load_mtp, load_own_mtp
from models.kernels.reference import ReferenceKernels
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from tests.models.drafters import serial_oracle

DEMO = Path("models/demo")


def test_a_run_writes_two_folders_that_can_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(train_drafters, "SMOKE", replace(train_drafters.SMOKE, minutes=0.02, documents=60))
    train_drafters.main(["--out", str(tmp_path), "--smoke", "--device", "cpu"])
    record = json.loads((tmp_path / "drafters.json").read_text(encoding="utf-8"))
    assert set(record["held_out"]) == {"mtp", "dflash"}
    config = ModelConfig.from_folder(DEMO)
    target = load_model(config, DEMO, dtype=torch.float32, collectives=SingleRank(), kernels=ReferenceKernels())
    load_mtp(target, MTPConfig.from_folder(tmp_path / "mtp"), tmp_path / "mtp")
    load_dflash(target, DFlashConfig.from_folder(tmp_path / "dflash"), tmp_path / "dflash")


SHAPE = Shape(32, 16, 24, 3, 4, 2, 8)
CONFIG = {
    "rms_norm_eps": SHAPE.rms_norm_eps,
    "rope_theta": SHAPE.rope_theta,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["full_attention"] * 2,
}


def rollouts() -> Rollouts:
    tokens_BL = torch.randint(SHAPE.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    return Rollouts(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool), 3)


def test_an_mtp_layer_is_trained_on_what_it_is_asked_when_serving() -> None:
    """Pass after pass, with the same entries to look back at as the serial oracle has."""
    torch.manual_seed(0)
    mtp, tokens_BL = MTP(SHAPE), rollouts().tokens_BL
    for parameter in mtp.parameters():  # far from the training's small beginnings
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.4)
    embedding = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size)
    hidden_BLN = torch.randn(2, 12, SHAPE.hidden_size)
    outputs = mtp.passes(embedding[tokens_BL], hidden_BLN, 3)
    weights = {f"mtp.{name}": tensor.detach() for name, tensor in mtp.state_dict().items()}
    for row, known in ((0, 4), (1, 8)):  # a round with so many tokens known: the first pass is at known - 1
        tokens = tokens_BL[row].tolist()
        states = list(hidden_BLN[row, : known - 1])
        for number in range(3):
            states.append(serial_oracle.mtp_state(weights, CONFIG, embedding, tokens[: known + number], states))
            torch.testing.assert_close(outputs[number][row, known - 1 + number], states[-1], rtol=1e-4, atol=1e-4)


def test_a_block_is_trained_on_what_it_is_asked_when_serving() -> None:
    torch.manual_seed(0)
    dflash = DFlash(DraftShape(SHAPE, layers=2, block_size=4, target_layer_ids=(0, 2)))
    for parameter in dflash.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.4)
    features_BLF = torch.randn(2, 12, 2 * SHAPE.hidden_size)
    embedded_BAWN = torch.randn(2, 2, 4, SHAPE.hidden_size)
    anchors_BA = torch.tensor([[3, 7], [5, 11]])
    out_BAWN = dflash.block(features_BLF, embedded_BAWN, anchors_BA)
    weights = {name: tensor.detach() for name, tensor in dflash.state_dict().items()}
    for row in range(2):
        for block in range(2):
            context = features_BLF[row, : anchors_BA[row, block]]
            expected = serial_oracle.dflash_block(weights, CONFIG, context, embedded_BAWN[row, block])
            torch.testing.assert_close(out_BAWN[row, block], expected, rtol=1e-4, atol=1e-4)


# ---- the hybrid with its own MTP layer ----


def small_hybrid() -> Hybrid:
    """Two delta nets and two layers of attention, far from the training's small beginnings."""
    torch.manual_seed(0)
    network = Hybrid(replace(HYBRID, num_hidden_layers=4, full_attention_interval=2))
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        elif not name.endswith(("A_log", "dt_bias")):
            torch.nn.init.normal_(parameter, mean=float(name.endswith("linear_attn.norm.weight")), std=0.3)
    return network


HYBRID = HybridShape(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    head_dim=8,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
)


def test_the_hybrid_is_what_transformers_says_and_a_run_writes_what_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the run: its folder is a checkpoint with an MTP layer. Of the architecture: logits, over two chunks."""
    from transformers import Qwen3_5ForCausalLM  # takes seconds, so not at collection

    torch.set_num_threads(1)
    network = small_hybrid()
    train_hybrid.save(network, hybrid_mtp(network.shape), tmp_path)
    ours = Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    served = {name: tensor.to(torch.bfloat16).float() for name, tensor in network.state_dict().items()}
    network.load_state_dict(served)
    ids = torch.randint(32, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(network.logits(network.hidden(ids)), ours(ids).logits, rtol=1e-4, atol=1e-4)
    small = replace(train_hybrid.SMOKE, minutes=0.02, documents=60, rollout_tokens=24)
    monkeypatch.setattr(train_hybrid, "SMOKE", small)
    train_hybrid.main(["--out", str(tmp_path), "--smoke", "--device", "cpu"])
    assert set(json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))["held_out"]) == {"mtp"}
    config = ModelConfig.from_folder(tmp_path)
    target = load_model(config, tmp_path, dtype=torch.float32, collectives=SingleRank(), kernels=ReferenceKernels())
    load_own_mtp(target, tmp_path)


def test_the_hybrid_continues_token_by_token_as_all_at_once() -> None:
    target = train_hybrid.HybridTarget(small_hybrid(), (99,))
    prompts_BP = torch.randint(32, (3, 5), generator=torch.Generator().manual_seed(0))
    tokens_BL = target.continue_all(prompts_BP, 64, 0.0).tokens_BL
    likely_BL = target.logits(target.states(tokens_BL, ())[0]).argmax(-1)
    assert torch.equal(likely_BL[:, 4:-1], tokens_BL[:, 5:])
    assert len(set(tokens_BL.flatten().tolist())) > 3


def test_the_hybrids_mtp_layer_is_trained_on_what_it_is_asked_when_serving() -> None:
    torch.manual_seed(0)
    mtp, tokens_BL = hybrid_mtp(HYBRID), rollouts().tokens_BL
    for parameter in mtp.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    embedding, hidden_BLN = torch.randn(32, 16), torch.randn(2, 12, 16)
    outputs = mtp.passes(embedding[tokens_BL], hidden_BLN, 3)
    weights = {f"mtp.{name}": tensor.detach() + (tensor.dim() == 1) for name, tensor in mtp.state_dict().items()}
    config = asdict(HYBRID) | {"attn_output_gate": True}
    for row, known in ((0, 4), (1, 8)):
        tokens = tokens_BL[row].tolist()
        states = list(hidden_BLN[row, : known - 1])
        for number in range(3):
            states.append(serial_oracle.mtp_state(weights, config, embedding, tokens[: known + number], states))
            torch.testing.assert_close(outputs[number][row, known - 1 + number], states[-1], rtol=1e-4, atol=1e-4)
