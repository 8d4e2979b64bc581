"""Train the tiny hybrid and its MTP layer, with the demo model's tokenizer and corpus: models/demo/hybrid.

    python -m models.demo.train_hybrid --minutes 2.5    # one GPU; writes models/demo/hybrid
    python -m models.demo.train_hybrid --out out/hybrid --minutes 15 --standard-library    # a CPU; a worse model
    python -m models.demo.train_hybrid --out out/smoke --smoke                             # seconds

Knows: the order of things (the model on documents, its continuations, the MTP layer on those), the files of the folder.
Does not know: the architecture (hybrid_network.py), the loss of the MTP layer (train_drafters.py), the runtime.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from models.demo.corpus import collect, find_sources
from models.demo.draft_networks import MTP
from models.demo.draft_rollouts import Rollouts, drawn, prompts, up_to_the_end
from models.demo.folder import write_json
from models.demo.hybrid_network import CHUNK, Hybrid, HybridLayer, HybridShape, hybrid_mtp
from models.demo.tokens import END_OF_TEXT, TURN_END, TokenStore, as_documents
from models.demo.train import smoke_corpus
from models.demo.train_drafters import (
    PROMPT_TOKENS,
    TEMPERATURES,
    Clock,
    Settings,
    add_training_options,
    endless,
    fit,
    guess_loss,
    measure,
    mtp_answers,
    mtp_guesses,
)

FOLDER = Path(__file__).parent
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
LONGEST = 1024  # tokens of a document
LEARNING_RATE = 4e-3  # of the model; the layer has that of the settings

# Shares of the minutes: rollouts, and of the rest the MTP layer. Anchors are a block drafter's.
GPU = Settings(2.5, 4096, 256, 256, 0, 3e-3, 1, 200_000, rollout_share=0.12, mtp_share=0.3, report_every=200)
CPU = Settings(15.0, 64, 128, 8, 0, 3e-3, 1, 20_000, held_out_rows=16, mtp_passes=3, rollout_share=0.1, report_every=20)
SMOKE = replace(CPU, minutes=0.1, rollout_rows=8, rollout_tokens=32, batch_rows=4, documents=300, held_out_rows=4)
BATCH_TOKENS = {"cuda": 65_536, "cpu": 2_048}


class Documents(NamedTuple):
    """ids_BL int64, padded behind; targets_BL: what follows each, -100 where nothing is to be predicted."""

    ids_BL: Tensor
    targets_BL: Tensor


def documents(store: TokenStore, tokens: int, seed: int, device: torch.device) -> Iterator[Documents]:
    """Endless batches of about ``tokens`` tokens, of documents of like lengths, in a new random order each epoch."""
    random = np.random.default_rng(seed)
    sizes = np.diff(store.starts)
    while True:
        order = random.permutation(len(store))
        for pool in np.array_split(order, max(1, int(sizes.sum()) // (32 * tokens))):
            by_length = pool[np.argsort(sizes[pool], kind="stable")]
            batches, first = [], 0
            while first < len(by_length):
                last = first + max(1, tokens // _padded(sizes[by_length[first]]))
                last = first + max(1, tokens // _padded(sizes[by_length[min(last, len(by_length)) - 1]]))
                batches.append(by_length[first:last])
                first = last
            for number in random.permutation(len(batches)):
                yield _padded_batch(store, batches[number], device)


def _padded(length: int) -> int:
    return -(-int(length) // CHUNK) * CHUNK


def _padded_batch(store: TokenStore, chosen: np.ndarray, device: torch.device) -> Documents:
    starts, ends = store.starts[chosen], store.starts[chosen + 1]
    place = np.arange(_padded((ends - starts).max()))
    there = place < (ends - starts)[:, None]
    at = np.minimum(starts[:, None] + place, len(store.ids) - 1)
    ids = np.where(there, store.ids[at], 1).astype(np.int64)
    targets = np.where(there, ids, -100)
    targets = np.concatenate((targets[:, 1:], np.full_like(targets[:, :1], -100)), 1)
    return Documents(*(torch.from_numpy(x).to(device, non_blocking=True) for x in (ids, targets)))


class HybridTarget:
    """The trained model as its MTP layer sees it (``Continues``); never trained on."""

    def __init__(self, network: Hybrid, ends: tuple[int, ...]) -> None:
        self.network = network.requires_grad_(False).eval()
        self.shape = network.shape
        self.ends = torch.tensor(ends, device=self.embedding.device)

    @property
    def embedding(self) -> Tensor:
        return self.network.model.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.network.model.embed_tokens(tokens)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.logits(hidden)

    @torch.no_grad()
    def states(self, tokens_BL: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(final-normed hidden [B, L, N], no features)."""
        length = tokens_BL.shape[1]
        padded = F.pad(tokens_BL, (0, _padded(length) - length))
        hidden_BLN = self.network.hidden(padded)[:, :length]
        return hidden_BLN, hidden_BLN[..., :0]

    @torch.no_grad()
    def continue_all(self, prompts_BP: Tensor, length: int, temperature: float) -> Rollouts:
        """To ``length`` tokens, greedily where ``temperature`` is 0; token by token from the beginning."""
        rows, prompt = prompts_BP.shape
        tokens_BL = torch.zeros(rows, length, dtype=torch.int64, device=prompts_BP.device)
        tokens_BL[:, :prompt] = prompts_BP
        states = [self._empty(number, rows, length) for number in range(self.shape.num_hidden_layers)]
        for place in range(length - 1):
            x_B1N = self.embed(tokens_BL[:, place : place + 1])
            for module, (first, second) in zip(self.network.model.layers, states, strict=True):
                layer = cast(HybridLayer, module)
                normed_B1N = layer.input_layernorm(x_B1N)
                if hasattr(layer, "linear_attn"):
                    mixed_B1N = layer.linear_attn.step(normed_B1N, first, second)
                else:
                    mixed_B1N = self._attend(layer, normed_B1N, place, first, second)
                x_B1N = layer.finish(x_B1N, mixed_B1N)
            if place >= prompt - 1:
                logits_BV = self.logits(self.network.model.norm(x_B1N[:, 0])).float()
                tokens_BL[:, place + 1] = drawn(logits_BV, temperature)
        return up_to_the_end(tokens_BL, prompt, self.ends)

    def _empty(self, number: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Of a delta net the window of its convolution and its state; of attention keys and values [B, L, K, D]."""
        shape, embedding = self.shape, self.embedding
        if shape.is_linear(number):
            channels = 2 * shape.keys + shape.values
            window = embedding.new_zeros(rows, channels, shape.linear_conv_kernel_dim)
            heads = (shape.linear_num_value_heads, shape.linear_key_head_dim, shape.linear_value_head_dim)
            return window, torch.zeros(rows, *heads, device=embedding.device)
        keys = embedding.new_zeros(rows, length, shape.num_key_value_heads, shape.head_dim)
        return keys, torch.zeros_like(keys)

    @staticmethod
    def _attend(layer: HybridLayer, x_B1N: Tensor, place: int, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = layer.self_attn.heads(x_B1N, torch.tensor([place], device=x_B1N.device))
        keys[:, place], values[:, place] = k[:, 0], v[:, 0]
        q, k, v = (x.transpose(1, 2) for x in (q, keys[:, : place + 1], values[:, : place + 1]))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return layer.self_attn.out(x_B1N, mixed.transpose(1, 2))


def save(network: Hybrid, mtp: MTP, out: Path) -> None:
    """model.safetensors in bfloat16, the layer's tensors beside the model's as ``mtp.*``; config.json."""
    tensors = {**network.state_dict(), **{f"mtp.{name}": x for name, x in mtp.state_dict().items()}}
    whole = {name: x.detach().to("cpu", torch.bfloat16).contiguous() for name, x in tensors.items()}
    save_file(whole, out / "model.safetensors", metadata={"format": "pt"})
    shape = asdict(network.shape)
    rope = {"rope_type": "default"} | {key: shape.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    linear = [network.shape.is_linear(number) for number in range(network.shape.num_hidden_layers)]
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **shape,
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "rope_parameters": rope,
        "mtp_num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    write_json(out / "config.json", config)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.demo.train_hybrid", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "hybrid", help="folder (default: models/demo/hybrid)")
    add_training_options(parser, minutes="2.5; 15")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device(options.device)
    settings = SMOKE if options.smoke else GPU if device.type == "cuda" else CPU
    settings = replace(settings, seed=options.seed, minutes=options.minutes or settings.minutes)
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {what}", flush=True)

    torch.manual_seed(settings.seed)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ends = tuple(tokenizer.token_to_id(text) or 0 for text in (END_OF_TEXT, TURN_END))
    if options.smoke:
        corpus = smoke_corpus(1)
    else:
        corpus = collect(find_sources(standard_library_only=options.standard_library), options.workers)
    units = corpus.training[: settings.documents] if options.smoke else corpus.training
    training = TokenStore(tokenizer, as_documents(units), LONGEST)
    held_out = TokenStore(tokenizer, as_documents(corpus.held_out), LONGEST)
    say(f"{len(training.ids)} tokens to train on, {len(held_out.ids)} held out")

    network = Hybrid(HybridShape()).to(device)
    mtp = hybrid_mtp(network.shape).to(device)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (network, mtp)]
    say(f"parameters: {sizes[0]} of the model, {sizes[1]} of its MTP layer")
    tokens = BATCH_TOKENS[device.type]
    left = settings.minutes * (1 - settings.rollout_share)
    batches = documents(training, tokens, settings.seed, device)
    curve = fit(
        network,
        lambda batch: network.loss(*batch),
        batches,
        replace(settings, learning_rate=LEARNING_RATE),
        left * (1 - settings.mtp_share),
        "model",
    )
    network.to(torch.bfloat16)  # what is served
    if device.type == "cpu":
        network.float()
    target = HybridTarget(network, ends)
    with torch.no_grad():
        checks = documents(held_out, tokens, 0, device)
        losses = [network.loss(*next(checks)).item() for _ in range(4)]
    say(f"held-out loss: {np.mean(losses):.4f}")

    lengths = tuple(p for p in PROMPT_TOKENS if p < settings.rollout_tokens // 2)
    fresh = prompts(training, settings.rollout_rows, lengths, settings.seed)
    clock = Clock(settings.minutes * settings.rollout_share)
    pool: list[Rollouts] = []
    while clock.share < 1 or len(pool) < len(lengths):
        batch = torch.from_numpy(next(fresh)).to(device)
        temperature = TEMPERATURES[len(pool) // len(lengths) % len(TEMPERATURES)]
        pool.append(target.continue_all(batch, settings.rollout_tokens, temperature))
    unseen = prompts(held_out, settings.held_out_rows, lengths, 0)
    tests = [
        target.continue_all(torch.from_numpy(next(unseen)).to(device), settings.rollout_tokens, 0.0) for _ in lengths
    ]
    say(f"rollouts: {sum(x.tokens_BL.numel() for x in pool)} tokens, {sum(int(x.real_BL.sum()) for x in pool)} real")

    def mtp_loss(rollouts: Rollouts) -> Tensor:
        logits, counted = mtp_guesses(target, mtp, rollouts, settings.mtp_passes)
        return guess_loss(logits, mtp_answers(rollouts.tokens_BL, settings.mtp_passes), counted)

    guesses = endless(pool, settings.batch_rows, settings.seed)
    mtp_curve = fit(mtp, mtp_loss, guesses, settings, left * settings.mtp_share, "mtp")
    record = measure(target, mtp, None, tests, settings.mtp_passes)
    options.out.mkdir(parents=True, exist_ok=True)
    save(network, mtp, options.out)
    for name in COPIED:
        shutil.copyfile(FOLDER / name, options.out / name)
    write_json(
        options.out / "training.json",
        {
            "settings": asdict(settings) | {"batch_tokens": tokens, "model_learning_rate": LEARNING_RATE},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "training_tokens_available": len(training.ids),
            "held_out_loss": round(float(np.mean(losses)), 4),
            "held_out": record,
            "curves": {"model": curve, "mtp": mtp_curve},
        },
    )
    say(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
