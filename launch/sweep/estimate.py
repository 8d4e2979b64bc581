"""About how long a point takes: from points like it that were measured, else from bytes and FLOPs.

Knows: the protocols' defaults, how much work a point is. Does not know: the machine, beyond two rough descriptions.
An estimate serves plans and time limits. It is no measurement, and may be off by a factor of two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.bench.options import H200_BYTES_PER_S, H200_FLOP_PER_S, LatencyOptions, ThroughputOptions
from launch.bench.serve_options import ServeOptions
from launch.sweep.point import Point

if TYPE_CHECKING:  # it imports torch, which takes seconds: a sweep that asks for no estimate starts without
    from launch.bench.roofline import Shape

MIXED_MEANS = (350, 260)  # tokens of a prompt and of an answer of `bench serve --dataset-name mixed`
LONG_MEANS = (21_500, 80)

SHAPES = Path(__file__).resolve().parents[2] / "models" / "shapes"


@dataclass(frozen=True, slots=True)
class Machine:
    """``startup_s``: until the first token, besides loading at ``load_bytes_per_s``. ``step_s``: of a step whose bytes
    are few. ``reach``: share of its ceilings that a run gets."""

    bytes_per_s: float
    flop_per_s: float
    startup_s: float
    load_bytes_per_s: float
    step_s: float
    reach: float
    value_bytes: int


GPU = Machine(H200_BYTES_PER_S, H200_FLOP_PER_S, 40.0, 1e9, 0.3e-3, 0.6, 2)
CPU = Machine(1e10, 2e10, 10.0, 1e9, 5e-3, 0.5, 4)


def estimate_seconds(point: Point, measured: Sequence[tuple[Point, float]] = ()) -> float | None:
    """``measured``: points and the seconds they took. None where the model's shape cannot be found."""
    alone = _work_seconds(point)
    if alone is None:
        return None
    ratios = [
        seconds / theirs
        for other, seconds in measured
        if _alike(point, other) and (theirs := _work_seconds(other)) is not None
    ]
    return alone * statistics.median(ratios) if ratios else alone


def runs_of(point: Point) -> tuple[int, int]:
    """Measured runs of a point, and all of its runs with those that warm up."""
    if point.bench == "serve":
        measured = _number(point, "num-iters", ServeOptions().num_iters) * len(batches_of(point))
        return measured, measured
    default = LatencyOptions()
    measured = _number(point, "num-iters", default.num_iters) * len(batches_of(point))
    return measured, measured + _number(point, "num-warmups", default.num_warmups) * len(batches_of(point))


def batches_of(point: Point) -> list[int]:
    """The batches that one process measures: usually a single one. Under load, requests that run at once."""
    if point.bench == "serve":
        rates = len(str(point.settings.get("request-rate", "inf")).split(","))
        most = _number(point, "max-num-seqs", 256)
        concurrency = point.settings.get("concurrency")
        return ([most] if concurrency is None else [int(part) for part in str(concurrency).split(",")]) * rates
    if point.bench == "throughput":
        return [_number(point, "concurrency", _number(point, "max-num-seqs", 256))]
    given = point.settings.get("batch")
    if given is None:
        return list(LatencyOptions().batch_size)
    return [int(part) for part in str(given).split(",")]


def _alike(point: Point, other: Point) -> bool:
    names = ("model", "tp", "ep", "dp", "device", "dtype", "quantization", "kv-cache-dtype")
    return point.bench == other.bench and all(point.settings.get(name) == other.settings.get(name) for name in names)


def _work_seconds(point: Point) -> float | None:
    """Start, and every run of every batch: prefill of its prompts, then a step a token."""
    machine = CPU if point.settings.get("device") == "cpu" else GPU
    shape = _shape(point, machine)
    if shape is None:
        return None
    _, runs = runs_of(point)
    batches = batches_of(point)
    dense, expert = shape.weight_bytes(machine.value_bytes)
    weights = dense / point.tp + expert * shape.experts / point.ranks
    total = machine.startup_s + weights / machine.load_bytes_per_s
    for batch in batches:
        total += runs / len(batches) * _run_seconds(point, shape, machine, batch)
    return total


def _run_seconds(point: Point, shape: Shape, machine: Machine, batch: int) -> float:
    from launch.bench.roofline import decode_floor

    fixed = point.bench == "latency"
    prompt = _number(point, "input-len", 512 if fixed else 1024)
    answer = _number(point, "output-len", 257 if fixed else 128)
    requests = batch if fixed else _number(point, "num-prompts", ThroughputOptions().num_prompts)
    if point.bench == "serve":
        prompt, answer, requests = _load_of(point, batch)
    floor = decode_floor(
        shape,
        batch=batch,
        length=prompt + answer / 2,
        ranks=point.ranks,
        value_bytes=machine.value_bytes,
        bytes_per_s=machine.bytes_per_s,
        flop_per_s=machine.flop_per_s,
        groups=point.ranks // point.tp,
    )
    step = floor.seconds / machine.reach + machine.step_s
    active = shape.dense + shape.expert * shape.experts_per_token
    prefill = 2.0 * active * prompt * requests / (machine.flop_per_s * machine.reach * point.ranks) + machine.step_s
    rounds = max(1.0, requests / batch)
    prefills = 2 if fixed else 1  # a run of fixed batches begins twice: for one token, and for all
    spent = prefills * prefill + rounds * answer * step
    return spent if point.bench != "serve" else max(spent, requests / _slowest_rate(point))


def _load_of(point: Point, batch: int) -> tuple[int, int, int]:
    """Mean prompt and answer of a load, and its requests."""
    settings, default = point.settings, ServeOptions()
    name = str(settings.get("dataset-name", default.dataset_name))
    means = {"random": (1024, 128), "long": LONG_MEANS, "prefix": (default.prefix_len + default.suffix_len, 128)}
    prompt, answer = means.get(name, MIXED_MEANS)
    if name == "random":
        prompt, answer = _number(point, "input-len", prompt), _number(point, "output-len", answer)
    asked = ServeOptions(dataset_name=name)  # type: ignore[arg-type]  # a grid's word, checked with its command line
    requests = asked.requests_of(batch if "concurrency" in settings else None)
    return prompt, answer, _number(point, "num-prompts", requests)


def _slowest_rate(point: Point) -> float:
    """Of arrivals, in requests a second; inf where nothing waits for them."""
    return min((float(part) for part in str(point.settings.get("request-rate", "inf")).split(",")), default=math.inf)


def _shape(point: Point, machine: Machine) -> Shape | None:
    import torch

    from launch.bench.roofline import Shape

    kv_dtype = torch.float32 if machine is CPU else torch.bfloat16
    if str(point.settings.get("kv-cache-dtype", "auto")).startswith("fp8"):
        kv_dtype = torch.float8_e4m3fn
    model, quantization = point.settings.get("model"), point.settings.get("quantization")
    option = None if quantization is None else str(quantization)
    for folder in (Path(str(model)), SHAPES / str(model)):
        try:
            return Shape.from_folder(folder, kv_dtype, option)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _number(point: Point, name: str, default: int) -> int:
    value = point.settings.get(name)
    return default if value is None else int(value)
