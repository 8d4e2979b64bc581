"""Train the demo model from nothing: collect, tokenise, train, write a Hugging Face model folder.

    python -m models.demo.train --out out/demo --minutes 5      # one GPU
    python -m models.demo.train --out out/smoke --smoke         # seconds on a CPU; the same files, no skill

Knows: the order of things, the optimiser and its schedule, what is reported.
Does not know: how the corpus is found (corpus.py), tokenised and packed (tokens.py), the architecture (network.py), the
files of a model folder (folder.py), the runtime that will serve it.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from models.demo.corpus import Corpus, collect, describe, find_sources
from models.demo.folder import save_configuration, save_weights, write_json
from models.demo.network import Packed, Qwen3, Shape
from models.demo.tokens import END_OF_TEXT, TURN_END, TokenStore, as_documents, pack, train_tokenizer

CHECK_BATCHES = 4  # held-out batches a report averages over
SAMPLE_PROMPTS = (
    "def fibonacci(n):",
    "def read_lines(path):",
    "class Stack:",
    "import os\n\n\ndef",
    "def is_prime(n):",
    "<|im_start|>user\nWrite a Python function add. Return the sum of two numbers.<|im_end|>\n<|im_start|>assistant\n",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run. It ends at ``steps`` or at ``minutes``, whichever comes first; the cosine follows both."""

    minutes: float
    steps: int
    batch_tokens: int
    learning_rate: float
    seed: int
    shape: Shape
    weight_decay: float = 0.1
    warmup_steps: int = 200
    report_every: int = 100
    tokenizer_characters: int = 60_000_000


SMOKE = Settings(
    minutes=60.0,
    steps=20,
    batch_tokens=1024,
    learning_rate=5e-3,
    seed=1,
    shape=Shape(512, 64, 96, 2, 4, 2, 16),
    warmup_steps=5,
    report_every=10,
    tokenizer_characters=200_000,
)


def learning_rate(settings: Settings, step: int, progress: float) -> float:
    """Linear warm-up, then a cosine down to 2 % over ``progress`` in [0, 1]."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return settings.learning_rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def make_optimizer(network: Qwen3, settings: Settings) -> torch.optim.AdamW:
    matrices = [p for p in network.parameters() if p.dim() == 2]
    vectors = [p for p in network.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(network.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused)


@torch.no_grad()
def held_out_loss(network: Qwen3, batches: Sequence[Packed], dtype: torch.dtype) -> float:
    """Mean nats a token over fixed batches of files that were not trained on."""
    device_type = batches[0].ids_T.device.type
    with torch.autocast(device_type, dtype, enabled=dtype != torch.float32):
        return sum(network.loss(batch, dtype).item() for batch in batches) / len(batches)


class Reporter:
    """Prints and keeps one record a report; the only place of the loop that waits for the device."""

    def __init__(self, network: Qwen3, checks: Sequence[Packed], dtype: torch.dtype, batch_tokens: int) -> None:
        self.records: list[dict[str, float | None]] = []
        self.started = time.monotonic()
        self._network, self._checks, self._dtype, self._batch_tokens = network, checks, dtype, batch_tokens

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def report(self, step: int, training_loss: torch.Tensor | None) -> None:
        record = {
            "step": step,
            "tokens": step * self._batch_tokens,
            "training_loss": None if training_loss is None else round(training_loss.item(), 4),
            "held_out_loss": round(held_out_loss(self._network, self._checks, self._dtype), 4),
            "seconds": round(self.seconds(), 1),
        }
        self.records.append(record)
        print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)


def train(
    network: Qwen3, batches: Iterator[Packed], checks: Sequence[Packed], settings: Settings, out: Path
) -> list[dict[str, float | None]]:
    """Run the schedule and return the loss curve. The weights are saved once a minute and at the end."""
    device = next(network.parameters()).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    optimizer = make_optimizer(network, settings)
    reporter = Reporter(network, checks, dtype, settings.batch_tokens)
    reporter.report(0, None)
    step, progress, saved = 0, 0.0, 0.0
    while progress < 1.0:
        progress = max((step + 1) / settings.steps, reporter.seconds() / (60 * settings.minutes))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, progress)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = network.loss(next(batches), dtype)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % settings.report_every == 0 or progress >= 1.0:
            reporter.report(step, loss.detach())
        if reporter.seconds() - saved > 60:
            save_weights(network, out)
            saved = reporter.seconds()
    save_weights(network, out)
    return reporter.records


@torch.no_grad()
def complete(
    network: Qwen3, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int, device: torch.device
) -> list[str]:
    """Greedy completions, recomputed from the start at each token: slow, simple, and independent of any engine."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ends = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)}
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    for _ in range(tokens):
        batch = pack([np.array(row) for row in rows], device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            hidden = network.hidden(batch, dtype)[batch.starts_N1[1:].long() - 1]
            chosen = network.logits(hidden).argmax(-1).tolist()
        rows = [row if row[-1] in ends else [*row, token] for row, token in zip(rows, chosen, strict=True)]
    return [tokenizer.decode(row, skip_special_tokens=False) for row in rows]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m models.demo.train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files")
    parser.add_argument("--minutes", type=float, default=5.0, help="wall-clock limit of the training loop (default 5)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="step limit (default: none to speak of)")
    parser.add_argument("--batch-tokens", type=int, default=131_072, help="tokens a step (default 131072)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak learning rate (default 3e-3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that read the corpus")
    parser.add_argument("--smoke", action="store_true", help="toy size, standard library only: seconds on a CPU")
    return parser.parse_args(arguments)


def smoke_corpus(workers: int) -> Corpus:
    """Sixty files of the standard library, one of six held out: enough to run every line."""
    sources = find_sources(standard_library_only=True)
    sources[0].files = sources[0].files[:60]
    corpus = collect(sources, workers)
    return replace(corpus, training=corpus.training[::2], held_out=corpus.held_out + corpus.training[1::12])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device(options.device)
    settings = SMOKE
    if not options.smoke:
        settings = Settings(
            options.minutes, options.steps, options.batch_tokens, options.learning_rate, options.seed, Shape()
        )
    shape = settings.shape
    options.out.mkdir(parents=True, exist_ok=True)
    clock = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - clock:6.1f} s] {what}", flush=True)

    corpus = smoke_corpus(options.workers) if options.smoke else collect(find_sources(), options.workers)
    (options.out / "CORPUS.md").write_text(describe(corpus), encoding="utf-8")
    say(f"corpus: {len(corpus.training)} units to train on, {len(corpus.held_out)} held out")
    tokenizer = train_tokenizer(corpus.training, shape.vocab_size, settings.tokenizer_characters, settings.seed)
    save_configuration(tokenizer, shape, options.out)
    say(f"tokenizer: {tokenizer.get_vocab_size()} tokens")
    training = TokenStore(tokenizer, as_documents(corpus.training), shape.max_position_embeddings)
    held_out = TokenStore(tokenizer, as_documents(corpus.held_out), shape.max_position_embeddings)
    say(f"tokens: {len(training.ids)} in {len(training)} documents, {len(held_out.ids)} held out")

    torch.manual_seed(settings.seed)
    network = Qwen3(shape).to(device)
    say(f"model: {sum(p.numel() for p in network.parameters())} parameters on {device.type}")
    batches = training.batches(settings.batch_tokens, settings.seed, device)
    checks = list(islice(held_out.batches(settings.batch_tokens, 0, device), CHECK_BATCHES))
    curve = train(network, batches, checks, settings, options.out)
    samples = complete(network, tokenizer, SAMPLE_PROMPTS, 16 if options.smoke else 160, device)
    for sample in samples:
        print("-" * 40, sample, sep="\n")
    write_json(
        options.out / "training.json",
        {
            "settings": asdict(settings),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "training_tokens_available": len(training.ids),
            "curve": curve,
            "samples": samples,
        },
    )
    say(f"written to {options.out}")


if __name__ == "__main__":
    main()
