"""What every measurement starts from: the engine's options as its protocol sets them, the ranks, and time.

Knows: protocol defaults, which model folder a name means, how an engine is opened for measuring.
Does not know: what is measured (latency.py, throughput.py, serve.py).
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from launch.bench.environment import process_age
from launch.bench.load.journal import DecodeStep
from launch.bench.options import (
    FIXED_BATCH_MODEL_LEN,
    PATIENCE_S,
    PREFILL_FIRST,
    BenchCommand,
    FlipsOptions,
    LatencyOptions,
    Lengths,
    RunOptions,
    ThroughputOptions,
)
from launch.bench.results import ResultFiles, make_folder
from launch.bench.roofline import Ceilings
from launch.bench.serve_options import ServeOptions
from launch.errors import UsageError
from launch.ranks.process_group import joined
from launch.ranks.rendezvous import Rendezvous, check_degrees, discover
from models.config import DTYPES
from models.kv_group import FP8
from models.registry import config_from_folder
from runtime.config import EngineConfig
from runtime.engine import Engine, ServedModel
from runtime.execute.result_reader import StepTiming

OnTiming = Callable[[StepTiming], None]
OpenEngine = Callable[[EngineConfig, Rendezvous, OnTiming | None], Engine]

SHAPES = Path(__file__).resolve().parents[2] / "models" / "shapes"

log = logging.getLogger("lockstride")


@dataclass(frozen=True, slots=True)
class Session:
    """One measurement on this rank. ``config`` has the protocol's defaults in it."""

    config: EngineConfig
    rendezvous: Rendezvous
    open_engine: OpenEngine
    result_dir: Path | None = None

    @property
    def is_leader(self) -> bool:
        return self.rendezvous.topology.is_leader

    @property
    def ranks(self) -> int:
        return self.rendezvous.topology.world

    @property
    def expert_parallel(self) -> int:
        """Ranks over which whole experts are spread; 1 where every rank has a share of each."""
        return self.config.ranks if self.config.expert_parallel else 1

    def files(self, kind: str) -> ResultFiles:
        """For the results of one measurement."""
        groups = f"dp{self.config.data_parallel}" if self.config.data_parallel > 1 else ""
        speculates = ""
        if (speculation := self.config.speculation) is not None:
            method = speculation.label.replace(" (synthetic)", "-synthetic").replace(" tree of ", "-tree")
            speculates = f"-{method}{speculation.num_speculative_tokens}"
        name = f"{kind}-{self.model}-tp{self.config.tensor_parallel}{groups}{speculates}"
        return ResultFiles(self.result_dir, name)

    @property
    def folder(self) -> Path:
        return Path(self.config.model)

    @property
    def model(self) -> str:
        """The folder's name: what results call the model."""
        return self.folder.resolve().name

    @property
    def served_model(self) -> ServedModel:
        """What requests are checked against."""
        facts = config_from_folder(self.folder)
        return ServedModel(facts.vocab_size, self.config.max_model_len or facts.max_length, facts.eos_token_ids)

    @property
    def kv_dtype(self) -> torch.dtype:
        wanted = self.config.kv_cache_dtype
        return FP8 if wanted.startswith("fp8") else DTYPES[self.precision if wanted == "auto" else wanted]

    @property
    def precision(self) -> str:
        """What ``auto`` resolves to, as runtime/build.py does."""
        if self.config.dtype != "auto":
            return self.config.dtype
        if self.config.device == "cpu":
            return "float32"
        return str(config_from_folder(self.folder).dtype).removeprefix("torch.")

    @property
    def described(self) -> dict[str, Any]:
        """The fields of a point (Measured) that a session has."""
        return {
            "model": self.model,
            "precision": self.precision,
            "tp": self.config.tensor_parallel,
            "ep": self.expert_parallel,
            "dp": self.config.data_parallel,
        }

    def ceilings(self, options: RunOptions) -> Ceilings:
        """Of each rank's device."""
        return Ceilings(
            ranks=self.ranks,
            value_bytes=DTYPES[self.precision].itemsize,
            bytes_per_s=options.bytes_per_s,
            flop_per_s=options.flop_per_s,
            groups=self.config.data_parallel,
        )

    def lead(self, measure: Callable[[Engine, StepTimings], int]) -> int:
        """An engine on all ranks, which ends after ``measure`` on the leader; returns what that returned, or 0."""
        with joined(self.rendezvous, self.config.device):
            code = self._led(measure)  # a call, so that nothing holds the engine when the ranks part
            gc.collect()  # closed engines refer to themselves; their graphs must go before the process group does
        return code

    def _led(self, measure: Callable[[Engine, StepTimings], int]) -> int:
        timings = StepTimings()
        with self.open_engine(self.config, self.rendezvous, timings) as engine:
            if not engine.is_leader:
                engine.follow()
                return 0
            code = measure(engine, timings)
            engine.stop()
        return code

    def progress(self, total: int) -> tqdm[Any]:
        """A bar on a terminal, on rank 0."""
        return tqdm(total=total, unit="run", disable=None if self.is_leader else True, leave=False)


def open_session(command: BenchCommand, environ: Mapping[str, str], open_engine: OpenEngine) -> Session:
    """Raises UsageError, ConfigError, RendezvousError or ModelConfigError for a command line that cannot work."""
    rendezvous, options = discover(environ), command.options
    assert not isinstance(options, FlipsOptions), "it needs no engine"
    engine = dict(command.engine)
    folder = model_folder(engine["model"])
    engine["model"] = str(folder)
    if "load_format" not in engine and not any(folder.glob("*.safetensors")):
        log.info("%s holds no weights: --load-format dummy", folder)
        engine["load_format"] = "dummy"
    rows, defaults = 1, {"control_timeout_s": PATIENCE_S}
    match options:
        case LatencyOptions(batch_size=batches):
            rows, defaults = max(batches), _fixed_batch_defaults(engine, folder)
        case ThroughputOptions(max_concurrency=most):
            rows = most or 1
        case ServeOptions(max_concurrency=points):
            rows = max(points, default=1)
    tensor_parallel = check_degrees(engine.get("tensor_parallel"), engine.get("data_parallel"), rendezvous)
    config = EngineConfig(**{**defaults, **engine, "tensor_parallel": tensor_parallel})
    if config.running_seqs < rows:
        in_a_group = -(-rows // config.data_parallel)
        if isinstance(options, LatencyOptions) and "max_num_seqs" in engine:
            raise UsageError(
                f"--max-num-seqs is {config.max_num_seqs}, but --batch-size asks for {in_a_group} rows"
                f"{' in each group' if config.data_parallel > 1 else ''}: type --max-num-seqs {in_a_group}"
            )
        engine.setdefault("max_num_seqs", in_a_group)
        config = EngineConfig(**{**defaults, **engine, "tensor_parallel": tensor_parallel})
    if isinstance(options, LatencyOptions):
        _check_lengths(options.lengths, config)
    if rendezvous.topology.is_leader and options.result_dir is not None:
        make_folder(options.result_dir)  # before anything is measured
    return Session(config, rendezvous, open_engine, options.result_dir)


def _check_lengths(lengths: Lengths, config: EngineConfig) -> None:
    """Of a fixed batch. Raises UsageError."""
    if lengths.output < 2:
        raise UsageError("--output-len 1 has no time between tokens: type 2 or more")
    if config.max_model_len is not None and lengths.total > config.max_model_len:
        raise UsageError(
            f"--input-len {lengths.prompt} and --output-len {lengths.output} make {lengths.total} tokens, but "
            f"--max-model-len is {config.max_model_len}: type --max-model-len {lengths.total} or less of the others"
        )


def model_folder(model: str) -> Path:
    """``model`` as a folder, or as the name of one of the shapes that come with Lockstride. Raises UsageError."""
    if Path(model).is_dir():
        return Path(model)
    if (SHAPES / model / "config.json").is_file() and Path(model).name == model:
        return SHAPES / model
    shapes = ", ".join(sorted(path.parent.name for path in SHAPES.glob("*/config.json")))
    raise UsageError(f"--model {model}: there is no such folder, and no such shape (there are {shapes})")


def _fixed_batch_defaults(engine: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What the fixed-batch protocol says about the engine. Raises UsageError where the command line contradicts it."""
    if engine.get("prefix_caching"):
        raise UsageError("fixed batches are measured without a prefix cache: leave out --prefix-caching")
    return {
        "prefix_caching": False,
        "mixed_steps": False,
        "prefill_burst": PREFILL_FIRST,
        "max_model_len": min(FIXED_BATCH_MODEL_LEN, config_from_folder(folder).max_length),
        "control_timeout_s": PATIENCE_S,
    }


class StepTimings:
    """Device times of the steps of a run, by step; filled by the landing thread, read when a run has ended."""

    def __init__(self) -> None:
        self._by_step: dict[int, StepTiming] = {}

    def __call__(self, timing: StepTiming) -> None:
        self._by_step[timing.step] = timing

    def clear(self) -> None:
        self._by_step.clear()

    def of(self, steps: Iterable[DecodeStep]) -> DeviceWindow | None:
        """Of consecutive decode steps; None of fewer than two."""
        return _window([self._by_step[decode.step] for decode in steps])

    @property
    def whole(self) -> DeviceWindow | None:
        """Of every step of the run, prefill too; None of fewer than two."""
        return _window([self._by_step[step] for step in sorted(self._by_step)])

    def between(self, steps: range) -> DeviceWindow | None:
        """Of those steps of ``steps`` that the device ran; None of fewer than two."""
        return _window([self._by_step[step] for step in sorted(self._by_step) if step in steps])


def _window(timings: Sequence[StepTiming]) -> DeviceWindow | None:
    if len(timings) < 2:
        return None
    gaps = [after.started_ms - before.ended_ms for before, after in pairwise(timings)]
    busy = [timing.ended_ms - timing.started_ms for timing in timings]
    span = timings[-1].ended_ms - timings[0].ended_ms
    return DeviceWindow(
        step_ms=span / (len(timings) - 1),
        busy_ms=statistics.median(busy),
        idle_ms=sum(gaps) / len(gaps),
        idle_fraction=sum(gaps) / span if span > 0 else 0.0,
    )


@dataclass(frozen=True, slots=True)
class DeviceWindow:
    """Consecutive steps by the device's clock. ``step_ms``: from end to end; ``busy_ms``: from start to end, median;
    ``idle_ms``: from an end to the next start, mean."""

    step_ms: float
    busy_ms: float
    idle_ms: float
    idle_fraction: float


def startup_seconds(first_token_at: float) -> float:
    """From the start of this process to a moment of time.perf_counter's clock."""
    return process_age() - (time.perf_counter() - first_token_at)
