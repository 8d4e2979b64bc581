"""Where the time to a first token goes over HTTP: `python -m tests.launch.serve.first_token --concurrency 16`.

Knows: the same closed loop on an engine of this process and on `launch serve` over it, both with a device that only
takes its time (paced.py), and the stations of a request in between. Does not know: GPUs (tests/bench/front_door.py
compares the two there).

    began   the client had the answer before this one      planned    the turn that admits it
    sent    by the client                                   landed     the step with its first token
    arrived at the API process                              told       to the API process
    read    by rank 0                                       received   by the client
    added   to the engine, by the turn
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from launch.bench.load.client_process import ClientProcesses, ServerAddress
from launch.bench.load.datasets import mixed_requests
from launch.bench.load.engine_backend import EngineBackend
from launch.bench.load.generator import generate_load
from launch.bench.load.journal import Journal
from launch.bench.load.openai_backend import OpenAIBackend
from runtime.config import EngineConfig
from runtime.frontend.client import PromptRequest
from tests.launch.serve.paced_main import KEY_IDS
from tests.runtime.engine.paced import paced_engine

ROOT = Path(__file__).resolve().parents[3]
ENGINE: dict[str, Any] = {"max_num_seqs": 64, "max_prefill_tokens": 2048, "max_model_len": 4096, "block_size": 64}


def load(count: int, answer: int) -> list[PromptRequest]:
    made = mixed_requests(count, 6, 4096, 2000, answer)
    return [replace(one, sampling=replace(one.sampling, ignore_eos=True)) for one in made]


def inside(given: argparse.Namespace, requests: list[PromptRequest]) -> Journal:
    config = EngineConfig(model="none", device="cpu", chain_depth=given.depth, **ENGINE)
    engine = paced_engine(config, decode_ms=given.step_ms, token_ms=given.token_ms)
    prompts = [len(one.prompt) for one in requests]
    journal = generate_load(EngineBackend(engine, requests), prompts, [0.0] * len(requests), given.concurrency)
    engine.stop()
    return journal


def outside(
    given: argparse.Namespace, requests: list[PromptRequest], out: Path, options: list[str]
) -> tuple[Journal, list[dict[str, Any]], dict[str, float]]:
    marks, address = out / "marks", out / "address"
    address.unlink(missing_ok=True)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items() if name != "max_prefill_tokens"]
    words += [f"--max-num-batched-tokens={ENGINE['max_prefill_tokens']}", f"--chain-depth={given.depth}", *options]
    words += ["--model", "models/demo", "--served-model-name", "m", "--port", "0", "--address-file", str(address)]
    environ = {**os.environ, "PACED": f"{given.step_ms} {given.token_ms}", "PACED_MARKS": str(marks)}
    with (out / "log").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.serve.paced_main", "serve", "--device", "cpu", *words],
            cwd=ROOT, env=environ, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not address.exists():
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit((out / "log").read_text()[-2000:])
            time.sleep(0.05)
        url = address.read_text().strip()
        with closing(ClientProcesses(given.client_processes, ServerAddress(url, "/v1/completions", "m"))) as clients:
            prompts = [len(one.prompt) for one in requests]
            backend = OpenAIBackend(clients, requests)
            journal = generate_load(backend, prompts, [0.0] * len(requests), given.concurrency)
    finally:
        server.terminate()
        server.wait(30)
    rows = [json.loads(line) for line in marks.read_text().splitlines()]
    return journal, rows, json.loads(marks.with_suffix(".counters").read_text())


def stations(
    journal: Journal, requests: list[PromptRequest], rows: list[dict[str, Any]], skip: int
) -> dict[str, list[float]]:
    """Milliseconds between stations, of the requests behind the first ``skip``."""
    by_key = {tuple(row["key"]): row for row in rows}
    names = ("began", "sent", "arrived", "read", "added", "planned", "landed", "told", "received")
    found: dict[str, list[float]] = {f"{a} > {b}": [] for a, b in pairwise(names)}
    for one, request in list(zip(journal.requests, requests, strict=True))[skip:]:
        if one.failed:
            continue
        row = by_key[tuple(request.prompt[:KEY_IDS])]
        row |= {"began": one.began, "sent": one.sent, "received": one.moments[0]}
        for a, b in pairwise(names):
            found[f"{a} > {b}"].append(1e3 * (row[b] - row[a]))
    return found


def shown(times: list[float]) -> str:
    ranked = sorted(times)
    return f"{statistics.fmean(ranked):8.2f} {ranked[len(ranked) // 2]:8.2f} {ranked[int(0.9 * len(ranked))]:8.2f}"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="first_token")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--answer", type=int, default=100, help="most tokens of an answer")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--token-ms", type=float, default=0.012)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--client-processes", type=int, default=1)
    parser.add_argument("engine", nargs="*", help="further options of the server, behind --")
    given = parser.parse_args(words)
    requests = load(given.num_prompts, given.answer)
    plain, skip = inside(given, requests), given.concurrency
    with tempfile.TemporaryDirectory() as folder:
        journal, rows, counters = outside(given, requests, Path(folder), given.engine)
    print(f"{'ms':22} {'mean':>8} {'median':>8} {'p90':>8}")
    print(f"{'engine: TTFT':22}", shown([1e3 * one.ttft for one in plain.requests[skip:]]))
    print(f"{'engine: ITL':22}", shown([1e3 * gap for one in plain.requests[skip:] for gap in one.gaps]))
    print(f"{'server: TTFT':22}", shown([1e3 * one.ttft for one in journal.requests[skip:] if not one.failed]))
    print(f"{'server: ITL':22}", shown([1e3 * gap for one in journal.requests[skip:] for gap in one.gaps]))
    for name, times in stations(journal, requests, rows, skip).items():
        print(f"{name:22}", shown(times))
    print(f"seconds: {plain.seconds:.2f} and {journal.seconds:.2f}; failed {len(journal.requests) - len(journal.good)}")
    print(*{one.error for one in journal.requests if one.failed}, sep="\n")
    print(counters)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
