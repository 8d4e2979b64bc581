"""Points of `bench serve` as an H200 might leave them, without measuring anything.

Knows: the fields of a point. Does not know: what any figure should be.
"""

from __future__ import annotations

from typing import Any

from launch.bench.point import ServePoint


def serve_point(concurrency: int | None, tok_s: float, rate: float | None = None, **more: Any) -> ServePoint:
    """Times grow with tokens a second; p99 is five times p50."""
    words = ([] if concurrency is None else [f"c{concurrency}"]) + ([] if rate is None else [f"r{rate:g}"])
    times = {"ttft": tok_s / 50, "tpot": tok_s / 1000, "itl": tok_s / 1000, "e2el": tok_s}
    factors = {"median": 1.0, "p90": 2.0, "p99": 5.0}
    known: dict[str, Any] = {
        "hw": "NVIDIA H200",
        "kind": "serve",
        "model": "qwen3-8b",
        "precision": "bfloat16",
        "tp": 1,
        "ep": 1,
        "batch": concurrency or 256,
        "input_len": None,
        "output_len": None,
        "chain_depth": 2,
        "runs": 1,
        "tpot_ms": times["tpot"],
        "ttft_s": times["ttft"] / 1e3,
        "tok_s": tok_s,
        "tok_s_per_gpu": tok_s,
        "tok_s_per_user": 1e3 / times["tpot"],
        "chained_ratio": 0.98,
        "device_idle": 0.01,
        "label": "".join(words) or "all",
        "dataset": "mixed",
        "seed": 5 if concurrency is None else 6,
        "num_prompts": 1024 if concurrency is None else 384,
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": concurrency,
        "duration_s": 25.0,
        "request_throughput": tok_s / 260,
        "request_goodput": tok_s / 300,
        "total_token_throughput": 2 * tok_s,
        "steady_tok_s": 1.05 * tok_s,
        **{f"{word}_{name}_ms": value * factor for name, value in times.items() for word, factor in factors.items()},
    }
    return ServePoint(**(known | more))
