"""What the front door costs: the same load on an engine of the process, and on `launch serve` over it, on one host.

    python3 -m tests.bench.front_door --model qwen3-8b --out out/door                    # issue's three points, one GPU
    python3 -m tests.bench.front_door --model qwen3-0.6b --max-concurrency 256 --api-processes 1 2 --out out/door

Knows: which commands are compared, and what may differ: output tokens/s at least 97 %, the 99th percentile of gaps
between tokens at most 1.5 ms more, the median time to first token at most 2 ms more. Does not know: how either is
measured (`launch bench serve`).

Weights are random ones. A shape has no tokenizer, and text is part of what a door costs: one is made, of as many tokens
as the shape has. OUT gets the files of all runs and front_door.json; the table goes to standard output. Beside it
stands processor time an event, of rank 0's process and of all API processes, and how long /health took meanwhile.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
LEAST_RATE, MOST_ITL_MS, MOST_TTFT_MS = 0.97, 1.5, 2.0
START_SECONDS = 300.0


def model_folder(model: str, out: Path) -> Path:
    """``model`` as it is where it has a tokenizer, else a folder in ``out`` with its configuration and a tokenizer."""
    given = Path(model) if Path(model).is_dir() else ROOT / "models/shapes" / model
    if (given / "tokenizer.json").exists():
        return given
    folder = out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(given / "config.json", folder)
    config = json.loads((given / "config.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(invented_tokenizer(config["vocab_size"])))
    return folder


def invented_tokenizer(size: int) -> dict[str, Any]:
    """A byte-level tokenizer of ``size`` tokens: all bytes, then words of one to nine letters, half with a space."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    bytes_of = {byte: chr(byte) for byte in printable}
    bytes_of |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in bytes_of)}
    vocab = {bytes_of[byte]: byte for byte in range(256)}
    draw = random.Random(1)
    while len(vocab) < size:
        word = "".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9)))
        vocab.setdefault(draw.choice(("", bytes_of[32])) + word, len(vocab))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
    }  # fmt: skip


def bench(arguments: argparse.Namespace, model: Path, results: Path, *further: str) -> dict[str, dict[str, Any]]:
    """The figures of each point, by its label. Raises CalledProcessError."""
    shutil.rmtree(results, ignore_errors=True)
    load = ["--dataset-name", arguments.dataset_name, "--max-concurrency", arguments.max_concurrency]
    load += ["--num-prompts", str(arguments.num_prompts), "--seed", str(arguments.seed), "--result-dir", str(results)]
    for name in ("input_len", "output_len"):
        if (length := getattr(arguments, name)) is not None:
            load += [f"--{name.replace('_', '-')}", str(length)]
    words = [sys.executable, "-m", "launch", "bench", "serve", "--model", str(model), *load, *further]
    subprocess.run(words, check=True, cwd=ROOT, stdout=sys.stderr)
    runs = {path.name.split(".")[-2].split("-")[0]: path for path in results.glob("*-run0.json")}
    return {label: json.loads(path.read_text()) for label, path in runs.items()}


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def api_processes(pid: int) -> list[int]:
    """The API processes of rank 0's process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"launch.serve.api_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


@contextmanager
def server(model: Path, out: Path, options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A server for the time of a block: its address, and the process id of rank 0."""
    address = out / "address"
    address.unlink(missing_ok=True)
    words = [sys.executable, "-m", "launch", "serve", "--model", str(model), "--served-model-name", "door"]
    words += ["--port", "0", "--address-file", str(address), *options]
    with (out / "server.log").open("ab") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
    try:
        until = time.monotonic() + START_SECONDS
        while not address.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server does not begin to serve; {out / 'server.log'} ends:\n"
                                 + (out / "server.log").read_text()[-2000:])  # fmt: skip
            time.sleep(0.2)
        yield address.read_text().strip(), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def probing(url: str) -> Iterator[list[float]]:
    """Asks for /health twenty times a second, over one connection; the milliseconds that each took."""
    parts, over, times = urlsplit(url), threading.Event(), list[float]()

    def probe() -> None:
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as connection:
            while not over.wait(0.05):
                began = time.perf_counter()
                connection.request("GET", "/health")
                response = connection.getresponse()
                response.read()
                times.append(1e3 * (time.perf_counter() - began) if response.status == 200 else float("inf"))

    thread = threading.Thread(target=probe, name="probe")
    thread.start()
    try:
        yield times
    finally:
        over.set()
        thread.join()


def compared(inside: dict[str, Any], outside: dict[str, Any]) -> dict[str, Any]:
    """One point: the server's figures beside the engine's, and whether each rule holds."""
    names = ("output_throughput", "p99_itl_ms", "median_itl_ms", "median_ttft_ms", "p99_ttft_ms")
    row: dict[str, Any] = {f"{name}{{{who}}}": of[name] for name in names for who, of in
                           (("engine", inside), ("server", outside))}  # fmt: skip
    row["rate"] = outside["output_throughput"] / inside["output_throughput"]
    row["itl_p99_more_ms"] = outside["p99_itl_ms"] - inside["p99_itl_ms"]
    row["ttft_p50_more_ms"] = outside["median_ttft_ms"] - inside["median_ttft_ms"]
    row["failed"] = inside["failed"] + outside["failed"]
    row["holds"] = {
        "rate": row["rate"] >= LEAST_RATE,
        "itl": row["itl_p99_more_ms"] <= MOST_ITL_MS,
        "ttft": row["ttft_p50_more_ms"] <= MOST_TTFT_MS,
        "answered": row["failed"] == 0,
    }
    return row


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = model_folder(arguments.model, out)
    engine = ["--max-num-seqs", str(arguments.max_num_seqs), "--no-prefix-caching", *arguments.engine]
    if not any(model.glob("*.safetensors")):
        engine += ["--load-format", "dummy"]
    inside = bench(arguments, model, out / "engine", *engine)
    told: dict[str, Any] = {"model": arguments.model, "num_prompts": arguments.num_prompts, "points": []}
    for processes in arguments.api_processes:
        options = [*engine, "--api-processes", str(processes), "--max-queued-requests", "8192"]
        with server(model, out, options) as (url, pid):
            doors = api_processes(pid)
            before = [processor_seconds(one) for one in (pid, *doors)]
            further = ["--base-url", url, "--client-processes", str(arguments.client_processes)]
            with probing(url) as times:
                outside = bench(arguments, model, out / f"server-{processes}", *further)
            spent = [processor_seconds(one) - was for one, was in zip((pid, *doors), before, strict=True)]
        events = sum(point["total_output_tokens"] for point in outside.values())
        costs = {"rank 0": 1e6 * spent[0] / events, "API processes": 1e6 * sum(spent[1:]) / events}
        for label in sorted(inside, key=lambda name: int(name[1:])):
            row = compared(inside[label], outside[label])
            told["points"].append({"concurrency": int(label[1:]), "api_processes": processes, **row})
        told[f"us_per_event{{{processes}}}"] = costs
        ranked = sorted(times) or [float("nan")]
        places = {"median": len(ranked) // 2, "p99": int(0.99 * len(ranked)), "longest": len(ranked) - 1}
        told[f"health_ms{{{processes}}}"] = {name: ranked[place] for name, place in places.items()}
    (out / "front_door.json").write_text(json.dumps(told, indent=1))
    return told


def table(told: dict[str, Any]) -> str:
    lines = [
        f"{told['model']}, {told['num_prompts']} requests a point",
        "| streams | API processes | engine tok/s | server tok/s | ratio | ITL p99 [ms] | TTFT p50 [ms] | holds |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in told["points"]:
        holds = ", ".join(f"not {name}" for name, held in row["holds"].items() if not held) or "all"
        lines.append(
            f"| {row['concurrency']} | {row['api_processes']} | {row['output_throughput{engine}']:,.0f} "
            f"| {row['output_throughput{server}']:,.0f} | {row['rate']:.3f} | {row['itl_p99_more_ms']:+.2f} "
            f"| {row['ttft_p50_more_ms']:+.2f} | {holds} |"
        )
    for name, costs in told.items():
        if name.startswith(("us_per_event", "health_ms")):
            lines.append(f"{name}: " + ", ".join(f"{who} {cost:.1f}" for who, cost in costs.items()))
    return "\n".join(lines)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="front_door")
    parser.add_argument("--model", required=True, help="a folder, or a name of models/shapes")
    parser.add_argument("--max-concurrency", default="16,64,256")
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--dataset-name", default="mixed")
    parser.add_argument("--input-len", type=int, help="the dataset's own otherwise, as with --output-len")
    parser.add_argument("--output-len", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--api-processes", type=int, nargs="+", default=[1])
    parser.add_argument("--client-processes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--out", type=Path, default=ROOT / "out/door")
    parser.add_argument("engine", nargs="*", help="further options of the engine, behind --")
    given = parser.parse_args(words)
    told = measure(given)
    print(table(told))
    return 0 if all(all(row["holds"].values()) for row in told["points"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
