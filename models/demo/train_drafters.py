"""Train the demo model's drafters on its own continuations: an MTP layer and a DFlash block drafter.

    python -m models.demo.train_drafters --minutes 5    # one GPU; writes models/demo/mtp and models/demo/dflash
    python -m models.demo.train_drafters --out out/drafters --minutes 10 --standard-library    # a CPU
    python -m models.demo.train_drafters --out out/smoke --smoke                               # seconds

Knows: the order of things, the losses, the optimiser and its schedule, what is reported, the files of a drafter's
folder.
Does not know: the architectures (draft_networks.py), how rollouts are made (draft_rollouts.py), the runtime.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.demo.corpus import collect, find_sources
from models.demo.draft_networks import MTP, DFlash, DraftShape
from models.demo.draft_rollouts import Continues, Rollouts, Target, prompts
from models.demo.folder import write_json
from models.demo.network import Qwen3, Shape
from models.demo.tokens import END_OF_TEXT, TURN_END, TokenStore, as_documents
from models.demo.train import smoke_corpus

FOLDER = Path(__file__).parent
PROMPT_TOKENS = (8, 24, 64, 128)
TEMPERATURES = (0.0, 0.0, 0.0, 0.7)  # of rollouts, by turns
Batch = TypeVar("Batch")
LATER_GUESS_WEIGHT = 0.85  # of a guess, to the power of how many come before it in its round


@dataclass(frozen=True, slots=True)
class Settings:
    """One run: ``rollout_share`` of the minutes goes into rollouts, ``mtp_share`` of the rest into the MTP layer."""

    minutes: float
    rollout_rows: int
    rollout_tokens: int
    batch_rows: int
    anchors: int
    learning_rate: float
    seed: int
    documents: int
    held_out_rows: int = 256
    mtp_passes: int = 4
    rollout_share: float = 0.25
    mtp_share: float = 0.35
    most_rollouts: int = 200
    report_every: int = 100


GPU = Settings(5.0, 4096, 256, 256, 24, 3e-3, 1, 200_000)
CPU = Settings(20.0, 128, 160, 16, 16, 3e-3, 1, 20_000, held_out_rows=64, mtp_passes=3, report_every=20)
SMOKE = Settings(0.1, 8, 32, 4, 4, 3e-3, 1, 500, held_out_rows=4, mtp_passes=2, most_rollouts=4, report_every=5)


def load_target(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Target, Tokenizer]:
    """The demo model and its tokenizer."""
    keys = Shape.__dataclass_fields__
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    network = Qwen3(Shape(**{key: config[key] for key in keys}))
    network.load_state_dict(load_file(folder / "model.safetensors"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = tuple(tokenizer.token_to_id(text) or 0 for text in (END_OF_TEXT, TURN_END))
    return Target(network.to(device, dtype), ends), tokenizer


# ---- what each drafter is asked, and what it should have said ----


def mtp_guesses(target: Continues, mtp: MTP, rollouts: Rollouts, passes: int) -> tuple[Tensor, Tensor]:
    """(logits [B, L, P, V], counted [B, L, P]): entry (q, j) is the guess of the token at q + 1 + j by pass 1 + j of a
    round that begins at q."""
    tokens_BL = rollouts.tokens_BL
    hidden_BLN, _ = target.states(tokens_BL, ())
    outputs = mtp.passes(target.embed(tokens_BL).float(), hidden_BLN.float(), passes)
    logits, counted = [], []
    starts_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device) >= rollouts.prompt - 1
    for number, output_BLN in enumerate(outputs):
        logits.append(_ahead(target.logits(output_BLN.to(target.dtype)), number))
        counted.append(_ahead(rollouts.real_BL, number + 1) & starts_L)
    return torch.stack(logits, 2), torch.stack(counted, 2)


def mtp_answers(tokens_BL: Tensor, passes: int) -> Tensor:
    """The tokens [B, L, P] that ``mtp_guesses`` are of."""
    return torch.stack([_ahead(tokens_BL, 1 + number) for number in range(passes)], 2)


def _ahead(x_BL: Tensor, places: int) -> Tensor:
    """x of so many places later; zeros at the end."""
    return torch.cat((x_BL[:, places:], torch.zeros_like(x_BL[:, :places])), 1)


def dflash_guesses(
    target: Continues, dflash: DFlash, rollouts: Rollouts, anchors_BA: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [B, A, W - 1, V], tokens that they should be [B, A, W - 1], counted): a block begins at each anchor."""
    tokens_BL, draft = rollouts.tokens_BL, dflash.draft
    _, features_BLF = target.states(tokens_BL, draft.target_layer_ids)
    width, length = draft.block_size, tokens_BL.shape[1]
    place_BAW = anchors_BA[..., None] + torch.arange(width, device=anchors_BA.device)
    inside_BAW = place_BAW < length
    rows_B11 = torch.arange(len(tokens_BL), device=tokens_BL.device)[:, None, None]
    true_BAW = tokens_BL[rows_B11, place_BAW.clamp(max=length - 1)]
    real_BAW = rollouts.real_BL[rows_B11, place_BAW.clamp(max=length - 1)] & inside_BAW
    asked_BAW = torch.full_like(true_BAW, draft.mask_token_id)
    asked_BAW[..., 0] = true_BAW[..., 0]
    out_BAWN = dflash.block(features_BLF.float(), target.embed(asked_BAW).float(), anchors_BA)
    return target.logits(out_BAWN[:, :, 1:].to(target.dtype)), true_BAW[..., 1:], real_BAW[..., 1:]


def guess_loss(logits_XV: Tensor, tokens_X: Tensor, counted_X: Tensor) -> Tensor:
    """Mean nats of the counted guesses. The last dim of X is a guess's place in its round; early ones weigh more."""
    weights = LATER_GUESS_WEIGHT ** torch.arange(tokens_X.shape[-1], device=tokens_X.device)
    weights_X = counted_X * weights
    nats_X = F.cross_entropy(logits_XV.float().flatten(0, -2), tokens_X.flatten(), reduction="none").view(
        tokens_X.shape
    )
    return (nats_X * weights_X).sum() / weights_X.sum().clamp(min=1)


def acceptance(logits_XV: Tensor, tokens_X: Tensor, counted_X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(right, kept, rounds) by place: guesses that are right; those behind which all before were right, too; rounds."""
    right_X = (logits_XV.argmax(-1) == tokens_X) & counted_X
    kept_X = right_X.to(torch.int64).cumprod(-1)
    right, kept, counted = (x.flatten(0, -2).sum(0) for x in (right_X, kept_X, counted_X))
    return right, kept, counted


# ---- training ----


class Clock:
    """How much of some minutes is over."""

    def __init__(self, minutes: float) -> None:
        self.began, self.limit = time.monotonic(), 60 * minutes

    @property
    def share(self) -> float:
        return (time.monotonic() - self.began) / self.limit


def fit(
    drafter: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    batches: Iterator[Batch],
    settings: Settings,
    minutes: float,
    name: str,
) -> list[dict[str, float]]:
    """Adam with a cosine over the time; returns the loss curve."""
    matrices = [p for p in drafter.parameters() if p.dim() >= 2]
    vectors = [p for p in drafter.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
    clock, step = Clock(minutes), 0
    curve: list[dict[str, float]] = []
    device = next(drafter.parameters()).device
    while clock.share < 1:
        rate = settings.learning_rate * min(1.0, (step + 1) / 50)
        rate *= 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, clock.share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(next(batches))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % settings.report_every == 0 or clock.share >= 1:
            curve.append({"step": step, "loss": round(loss.item(), 4), "seconds": round(clock.share * clock.limit, 1)})
            print(f"{name}  " + "  ".join(f"{key} {value}" for key, value in curve[-1].items()), flush=True)
    return curve


def endless(pool: Sequence[Rollouts], rows: int, seed: int) -> Iterator[Rollouts]:
    """Random rows of random rollouts."""
    random = torch.Generator().manual_seed(seed)
    while True:
        rollouts = pool[int(torch.randint(len(pool), (1,), generator=random))]
        chosen = torch.randint(len(rollouts.tokens_BL), (rows,), generator=random).to(rollouts.tokens_BL.device)
        yield Rollouts(rollouts.tokens_BL[chosen], rollouts.real_BL[chosen], rollouts.prompt)


def some_anchors(rollouts: Rollouts, count: int) -> Tensor:
    """Random places at which a round may begin: from the last prompt token to the end."""
    rows, length = rollouts.tokens_BL.shape
    return torch.randint(rollouts.prompt, length - 1, (rows, count), device=rollouts.tokens_BL.device)


# ---- records and files ----


@torch.no_grad()
def measure(
    target: Continues, mtp: MTP, dflash: DFlash | None, held_out: Sequence[Rollouts], passes: int
) -> dict[str, object]:
    """Acceptance of rounds that begin anywhere in greedy rollouts of prompts that were not trained on."""
    found: dict[str, list[Tensor]] = {}
    for rollouts in held_out:
        for part in range(0, len(rollouts.tokens_BL), 16):
            some = Rollouts(rollouts.tokens_BL[part : part + 16], rollouts.real_BL[part : part + 16], rollouts.prompt)
            logits, counted = mtp_guesses(target, mtp, some, passes)
            _add(found, "mtp", acceptance(logits, mtp_answers(some.tokens_BL, passes), counted))
            if dflash is None:
                continue
            rows, length = some.tokens_BL.shape
            anchors = torch.arange(some.prompt, length - 1, 3, device=some.tokens_BL.device).expand(rows, -1)
            _add(found, "dflash", acceptance(*dflash_guesses(target, dflash, some, anchors)))
    record: dict[str, object] = {}
    for name, sums in found.items():
        right, kept, rounds = (x.double() for x in sums)
        record[name] = {
            "recall_at_1_by_position": [round(x, 4) for x in (right / rounds).tolist()],
            "accepted_by_position": [round(x, 4) for x in (kept / rounds).tolist()],
            "accepted_length": round(1 + float((kept / rounds).sum()), 3),
            "rounds": int(rounds[0]),
        }
    return record


def _add(found: dict[str, list[Tensor]], name: str, sums: tuple[Tensor, ...]) -> None:
    found[name] = [a + b for a, b in zip(found[name], sums, strict=True)] if name in found else list(sums)


def save_drafter(module: nn.Module, prefix: str, config: dict[str, object], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{prefix}{name}": x.detach().to("cpu", torch.bfloat16).contiguous() for name, x in module.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config)


def configurations(draft: DraftShape) -> tuple[dict[str, object], dict[str, object]]:
    """config.json of the MTP layer and of the DFlash drafter."""
    shape = draft.target
    common = asdict(shape)
    common.pop("num_hidden_layers")
    common |= {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    mtp = {"architectures": ["MTPDraftModel"], "model_type": "mtp", **common, "num_hidden_layers": 1}
    mtp |= {"num_target_layers": shape.num_hidden_layers, "norm_zero_centered": False}
    dflash = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **common, "num_hidden_layers": draft.layers}
    dflash |= {
        "num_target_layers": shape.num_hidden_layers,
        "block_size": draft.block_size,
        "layer_types": ["full_attention"] * draft.layers,
        "dflash_config": {
            "target_layer_ids": list(draft.target_layer_ids),
            "mask_token_id": draft.mask_token_id,
        },
    }
    return mtp, dflash


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.demo.train_drafters", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--target", type=Path, default=FOLDER, help="folder of the model to draft for")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="gets the folders mtp and dflash (default: models/demo)"
    )
    add_training_options(parser, minutes="5; 20")
    return parser.parse_args(arguments)


def add_training_options(parser: argparse.ArgumentParser, *, minutes: str) -> None:
    """Those that all such scripts have. ``minutes``: by default on a GPU, and on a CPU."""
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"of training and rollouts together, behind the reading of the corpus (default {minutes} on a CPU)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that read the corpus")
    parser.add_argument("--standard-library", action="store_true", help="texts of the standard library only")
    parser.add_argument("--smoke", action="store_true", help="toy amounts: seconds on a CPU")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device(options.device)
    settings = SMOKE if options.smoke else GPU if device.type == "cuda" else CPU
    fields = asdict(settings) | {"seed": options.seed, "minutes": options.minutes or settings.minutes}
    settings = Settings(**fields)
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {what}", flush=True)

    torch.manual_seed(settings.seed)
    target, tokenizer = load_target(options.target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if options.smoke:
        corpus = smoke_corpus(1)
    else:
        corpus = collect(find_sources(standard_library_only=options.standard_library), options.workers)
    longest = max(PROMPT_TOKENS) + 1
    units = torch.randperm(len(corpus.training))[: settings.documents].tolist()
    training = TokenStore(tokenizer, as_documents([corpus.training[i] for i in units]), longest)
    held_out = TokenStore(tokenizer, as_documents(corpus.held_out), longest)
    say(f"prompts: {len(training)} documents to train on, {len(held_out)} held out")

    lengths = tuple(p for p in PROMPT_TOKENS if p < settings.rollout_tokens // 2)
    fresh = prompts(training, settings.rollout_rows, lengths, settings.seed)
    clock = Clock(settings.minutes * settings.rollout_share)
    pool: list[Rollouts] = []
    while (clock.share < 1 or len(pool) < len(lengths)) and len(pool) < settings.most_rollouts:
        batch = torch.from_numpy(next(fresh)).to(device)
        temperature = TEMPERATURES[len(pool) // len(lengths) % len(TEMPERATURES)]
        pool.append(target.continue_all(batch, settings.rollout_tokens, temperature))
    say(f"rollouts: {sum(x.tokens_BL.numel() for x in pool)} tokens, {sum(int(x.real_BL.sum()) for x in pool)} real")
    checks = prompts(held_out, settings.held_out_rows, lengths, 0)
    tests = [
        target.continue_all(torch.from_numpy(next(checks)).to(device), settings.rollout_tokens, 0.0) for _ in lengths
    ]

    layers = target.shape.num_hidden_layers
    draft = DraftShape(target.shape, layers=2, target_layer_ids=tuple(sorted({1, layers // 2, layers - 1})))
    mtp, dflash = MTP(draft.target).to(device), DFlash(draft).to(device)
    sizes = [sum(p.numel() for p in drafter.parameters()) for drafter in (mtp, dflash)]
    say(f"parameters: {sizes[0]} MTP, {sizes[1]} DFlash")

    def mtp_loss(rollouts: Rollouts) -> Tensor:
        logits, counted = mtp_guesses(target, mtp, rollouts, settings.mtp_passes)
        return guess_loss(logits, mtp_answers(rollouts.tokens_BL, settings.mtp_passes), counted)

    def dflash_loss(rollouts: Rollouts) -> Tensor:
        return guess_loss(*dflash_guesses(target, dflash, rollouts, some_anchors(rollouts, settings.anchors)))

    left = settings.minutes * (1 - settings.rollout_share)
    batches = endless(pool, settings.batch_rows, settings.seed)
    mtp_config, dflash_config = configurations(draft)
    curves = {"mtp": fit(mtp, mtp_loss, batches, settings, left * settings.mtp_share, "mtp")}
    save_drafter(mtp, "mtp.", mtp_config, options.out / "mtp")
    curves["dflash"] = fit(dflash, dflash_loss, batches, settings, left * (1 - settings.mtp_share), "dflash")
    save_drafter(dflash, "", dflash_config, options.out / "dflash")
    record = measure(target, mtp, dflash, tests, settings.mtp_passes)
    write_json(
        options.out / "drafters.json",
        {
            "settings": asdict(settings),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "held_out": record,
            "curves": curves,
        },
    )
    say(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
