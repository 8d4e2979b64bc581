"""The deterministic mode on GPUs at shapes of real models: differing tokens and bits, the default's flips, the price.

One GPU: python3 -m tests.bench.determinism --out FOLDER [--model qwen3-8b] [--layers 4] [--prompts 200] [--tokens 256]
Several: the same with --ranks R: every condition is a job of torchrun, against the first of them. With --share-gpu
all ranks run on one GPU, where a step takes tens of milliseconds: --conditions leaves the slowest out.

The same random prompts, greedy and sampled, under every condition below; the first is one request at a time, serially.
Without --no-default the same in the default mode: flips per 1,000 tokens, and how close the two tokens were. Without
--no-price: ms of a decode step of both modes at several numbers of rows, and of a prefill. All of it is printed, and
kept in FOLDER/determinism.json. Exits with 1 where the deterministic mode differs in a token or a bit.

Knows: conditions that must not matter, and how runs are compared (tests/runtime/engine/same_bits.py). Does not know:
kernels. Weights are random, but for a folder that has some, with --layers 0: how often the default flips depends on a
model's logits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.complete import open_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.execute.sampling.counter_rng import Purpose, gumbel_noise, row_keys
from runtime.schedule.request import Request, SamplingParams
from tests.runtime.engine.same_bits import Answers, answers, difference

SHAPES = Path(__file__).parents[2] / "models" / "shapes"
LENGTH = 2048
PAGE = 64
LISTED = 20  # likeliest tokens that answers tell, so that both scores of another token are known
BLOCKS = 4096  # for 200 such prompts at once, and small enough for several runs side by side on one GPU
Limits = dict[str, Any]  # fields of an EngineConfig
CONDITIONS: dict[str, Limits] = {
    "batch 1, D 0": {"max_num_seqs": 1, "chain_depth": 0, "prefix_caching": False, "mixed_steps": False},
    "batch 7, D 1, chunks of 64": {"max_num_seqs": 7, "chain_depth": 1, "max_prefill_tokens": 64},
    "batch 64, D 2, chunks of 512": {"max_num_seqs": 64, "chain_depth": 2, "max_prefill_tokens": 512},
    "batch 256, D 2": {"max_num_seqs": 256, "chain_depth": 2},
    "batch 256, D 4, no prefix cache": {"max_num_seqs": 256, "chain_depth": 4, "prefix_caching": False},
    "batch 64, D 3, evictions": {"max_num_seqs": 64, "chain_depth": 3, "num_blocks": 8 * LENGTH // PAGE},
    "batch 64, D 0, prefill in turns": {"max_num_seqs": 64, "chain_depth": 0, "mixed_steps": False},
    "batch 7, D 2, no prefill graphs": {"max_num_seqs": 7, "chain_depth": 2, "prefill_graphs": False},
}
EVICTS = "batch 64, D 3, evictions"
PRICED_ROWS = (1, 8, 32, 128, 256)
PRICED_PROMPT, PRICED_STEPS, WARM_STEPS = 1024, 48, 8
PREFILL_PROMPT, PREFILLS = 4096, 5


def requests_of(count: int, tokens: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """Random prompts of 1 to 1,500 tokens, half of them behind one of four stems; every other is greedy."""
    draw = random.Random(seed)
    stems = [[draw.randrange(vocabulary) for _ in range(700)] for _ in range(4)]
    found = []
    for number in range(count):
        stem = draw.choice(stems)[: draw.randrange(64, 700)] if draw.random() < 0.5 else []
        prompt = stem + [draw.randrange(vocabulary) for _ in range(draw.choice((1, 9, 60, 200, 800)))]
        sampling = SamplingParams(
            temperature=0.0 if number % 2 else 0.8,
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((0, 50)),
            max_tokens=tokens,
            seed=number,
            logprobs=LISTED,
        )
        found.append(Request(number, tuple(prompt), sampling, ()))
    return found


def folder_of(out: Path, model: str, layers: int) -> Path:
    """A folder with the model's config.json, cut to so many layers; 0 keeps them all, and the weights if it has any."""
    source = SHAPES / model if (SHAPES / model).is_dir() else Path(model)
    if not layers and _has_weights(source):
        return source
    config = json.loads((source / "config.json").read_text())
    if layers:
        config["num_hidden_layers"] = layers
    folder = out / f"{source.name}-{layers or 'all'}-layers"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def config_of(folder: Path, limits: Limits, *, deterministic: bool) -> EngineConfig:
    common: Limits = {"max_model_len": LENGTH, "block_size": PAGE, "memory_fraction": 0.8}
    common["num_blocks"] = BLOCKS
    common["load_format"] = "safetensors" if _has_weights(folder) else "dummy"
    return EngineConfig(model=str(folder), deterministic=deterministic, **(common | limits))


def play(folder: Path, limits: Limits, args: argparse.Namespace, *, deterministic: bool) -> tuple[Answers, int]:
    """(rank 0's answers, evictions); nothing on the other ranks."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    with open_engine(config_of(folder, limits, deterministic=deterministic)) as engine:
        if not engine.is_leader:
            engine.follow()
            return Answers(), 0
        most = 40 * args.prompts * (args.tokens + 100)
        found = answers(engine, requests_of(args.prompts, args.tokens, vocabulary), most, LISTED)
        return found, int(engine.counters["evictions"])


def written(path: Path, found: Answers, evictions: int) -> None:
    bits = {key: [entry.hex() for entry in entries] for key, entries in found.bits.items()}
    path.write_text(json.dumps({"tokens": found.tokens, "bits": bits, "evictions": evictions}))


def read(path: Path) -> tuple[Answers, int]:
    data = json.loads(path.read_text())
    tokens = {int(key): tuple(value) for key, value in data["tokens"].items()}
    bits = {int(key): [bytes.fromhex(entry) for entry in entries] for key, entries in data["bits"].items()}
    return Answers(tokens, bits), data["evictions"]


def in_a_job(name: str, args: argparse.Namespace, *, deterministic: bool) -> tuple[Answers, int]:
    """``play`` on several ranks: a job of its own."""
    path = args.out / "answers.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += ["-m", *(["tests.gpu.shared_gpu"] if args.share_gpu else []), "tests.bench.determinism"]
    command += ["--out", str(args.out), "--model", args.model, "--only", name]
    command += ["--layers", str(args.layers), "--prompts", str(args.prompts), "--tokens", str(args.tokens)]
    command += [] if deterministic else ["--worker-default"]
    subprocess.run(command, check=True)
    return read(path)


def compare(folder: Path, args: argparse.Namespace, *, deterministic: bool) -> list[dict[str, Any]]:
    """Every condition against the first."""
    expected: Answers | None = None
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    requests = requests_of(args.prompts, args.tokens, vocabulary)
    told: list[dict[str, Any]] = []
    for name, limits in CONDITIONS.items():
        if args.conditions and name not in args.conditions:
            continue
        began = time.monotonic()
        if args.ranks > 1:
            found, evictions = in_a_job(name, args, deterministic=deterministic)
        else:
            found, evictions = play(folder, limits, args, deterministic=deterministic)
        if name == EVICTS and not evictions:
            print(f"{name}: nothing was evicted", flush=True)
        line: dict[str, Any] = {"condition": name, "deterministic": deterministic, "evictions": evictions}
        if expected is None:
            expected = found
        else:
            differs = difference(found, expected)
            line |= asdict(differs) | {"per_1000": 1000 * differs.flips / max(1, differs.compared)}
            line |= {"gaps": gaps(requests, found, expected)}
        line["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(line), flush=True)
        told.append(line)
    return told


def gaps(requests: Sequence[Request], found: Answers, expected: Answers) -> dict[str, dict[str, float]]:
    """How far apart, in the expected run, the scores of the two tokens were where a request got another one.

    Scores are what the draw compares: log-probabilities over temperature plus the noise of the token, or
    log-probabilities of greedy requests. By kind of request: ``most`` and ``median``, how many such tokens there were,
    and how many were ``beyond`` the listed ones or what a filter had let through.
    """
    told = {}
    for kind, greedy in (("greedy", True), ("sampled", False)):
        seen: list[float] = []
        count = 0
        for one in requests:
            if (one.sampling.temperature == 0) != greedy:
                continue
            pairs = zip(found.tokens[one.request_id], expected.tokens[one.request_id], strict=False)
            place, other = next(((at, pair[0]) for at, pair in enumerate(pairs) if pair[0] != pair[1]), (None, 0))
            if place is None:
                continue
            count += 1
            chosen = expected.tokens[one.request_id][place]
            scores = scores_of(one, place, expected.bits[one.request_id][place])
            if chosen in scores and other in scores and scores[chosen] >= scores[other]:
                seen.append(scores[chosen] - scores[other])
        most, median = max(seen, default=0.0), statistics.median(seen or [0.0])
        told[kind] = {"tokens": count, "most": most, "median": median, "beyond": count - len(seen)}
    return told


def scores_of(request: Request, place: int, entry: bytes) -> dict[int, float]:
    """What the draw of the generated token at ``place`` compares, of each listed token; filters are not applied."""
    import numpy as np
    import torch

    listed = (len(entry) - 8) // 8  # behind the chosen token's log-probability and rank
    ids = np.frombuffer(entry[8 : 8 + 4 * listed], "i4").copy()
    logprobs = np.frombuffer(entry[8 + 4 * listed :], "f4").copy()
    if request.sampling.temperature == 0:
        return dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
    position = torch.tensor([len(request.prompt_token_ids) + place])
    keys = row_keys(torch.tensor([request.sampling.seed]), position, Purpose.TOKEN)
    noise = gumbel_noise(keys, torch.from_numpy(ids))[0].numpy()
    return dict(zip(ids.tolist(), (logprobs / request.sampling.temperature + noise).tolist(), strict=True))


# -- the price ---------------------------------------------------------------------------------------------------------


def price(folder: Path) -> list[dict[str, Any]]:
    """ms of a decode step and of the first token of a long prompt, in both modes."""
    told: list[dict[str, Any]] = []
    times: dict[bool, dict[str, float]] = {False: {}, True: {}}
    for deterministic in (False, True):
        limits: Limits = {"max_num_seqs": max(PRICED_ROWS), "max_model_len": 8192, "prefix_caching": False}
        with open_engine(config_of(folder, limits | {"num_blocks": None}, deterministic=deterministic)) as engine:
            for rows in PRICED_ROWS:
                times[deterministic][f"decode step of {rows} rows"] = _step_ms(engine, rows)
            times[deterministic][f"prefill of {PREFILL_PROMPT}"] = _prefill_ms(engine)
    for what, plain in times[False].items():
        mine = times[True][what]
        told.append({"what": what, "default_ms": plain, "deterministic_ms": mine, "ratio": mine / plain})
        print(json.dumps(told[-1]), flush=True)
    return told


def _request(number: int, length: int, tokens: int) -> Request:
    draw = random.Random(number)
    prompt = tuple(draw.randrange(200) for _ in range(length))
    return Request(number, prompt, SamplingParams(temperature=0.0, max_tokens=tokens, seed=0), ())


_numbers = iter(range(10_000_000, 20_000_000))


def _step_ms(engine: Engine, rows: int) -> float:
    """Of the second half of a batch's life, in which all its rows decode."""
    tokens = PRICED_STEPS + WARM_STEPS
    pending = [next(_numbers) for _ in range(rows)]
    for number in pending:
        engine.add(_request(number, PRICED_PROMPT, 4 * rows + tokens))  # until the last is there, the first go on
    marks: list[float] = []
    while engine.has_work:
        output = engine.step()
        if len(output.request_ids) == rows and all(output.counts) and len(marks) <= tokens:
            marks.append(time.perf_counter())
            if len(marks) > tokens:
                for number in pending:
                    engine.cancel(number)
    steady = marks[-PRICED_STEPS:]
    return 1e3 * (steady[-1] - steady[0]) / (len(steady) - 1)


def _prefill_ms(engine: Engine) -> float:
    """Median time to the first token of one prompt, the engine being idle."""
    found = []
    for _ in range(PREFILLS + 1):
        engine.add(_request(next(_numbers), PREFILL_PROMPT, 1))
        began = time.perf_counter()
        while engine.has_work:
            engine.step()
        found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-8b", help="a folder of models/shapes, or a path")
    parser.add_argument(
        "--layers", type=int, default=4, help="of the model that are kept; 0: all (default: %(default)s)"
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--share-gpu", action="store_true", help="with --ranks: all of them on one GPU")
    parser.add_argument("--conditions", nargs="*", choices=CONDITIONS, help="these only, against the first of them")
    parser.add_argument("--no-deterministic", action="store_true", help="only the default mode's flips")
    parser.add_argument("--no-default", action="store_true", help="leave the default mode's flips out")
    parser.add_argument("--no-price", action="store_true")
    parser.add_argument("--price-only", action="store_true")
    parser.add_argument("--only", choices=CONDITIONS, help=argparse.SUPPRESS)  # one condition, as a rank of a job
    parser.add_argument("--worker-default", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = folder_of(args.out, args.model, args.layers)
    if args.only is not None:
        found, evictions = play(folder, CONDITIONS[args.only], args, deterministic=not args.worker_default)
        if found.tokens:
            written(args.out / "answers.json", found, evictions)
        return 0
    told: dict[str, Any] = {"model": folder.name, "ranks": args.ranks, "prompts": args.prompts, "tokens": args.tokens}
    if not args.price_only:
        if not args.no_deterministic:
            told["deterministic"] = compare(folder, args, deterministic=True)
        if not args.no_default:
            told["default"] = compare(folder, args, deterministic=False)
    if not args.no_price and args.ranks == 1:
        told["price"] = price(folder)
    (args.out / "determinism.json").write_text(json.dumps(told, indent=1))
    wrong = sum(int(line.get("flips", 0) + line.get("bits", 0)) for line in told.get("deterministic", ()))
    print(f"{wrong} differing tokens and log-probabilities in the deterministic mode", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
