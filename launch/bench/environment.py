"""What a measurement was made on: versions, devices and their clocks, commit, seed, command line.

Knows: where these facts are found, and that any of them may be missing. Does not know: what was measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from launch.ranks.fingerprint import code_digest
from launch.ranks.rendezvous import Rendezvous
from runtime.config import EngineConfig
from runtime.engine import Engine

_PACKAGES = ("lockstride", "torch", "triton", "flashinfer-python", "numpy", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
_VARIABLES = ("NCCL_", "TORCH_", "CUDA_", "OMP_", "TRITON_", "FLASHINFER_", "LOCKSTRIDE_")
_CLOCKS = "index,name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
_SECONDS = 10.0  # for a tool to answer
_LONGEST_IMPORTS = 600.0  # from a process's start until this file is imported, seconds

_IMPORTED_AT = time.perf_counter()


def environment(config: EngineConfig, rendezvous: Rendezvous, engine: dict[str, Any]) -> dict[str, Any]:
    """Everything that is known, as plain values; what cannot be found is None. ``engine``: its ``engine_facts``."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "commit": _commit(),
        "code_digest": code_digest(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **_versions()},
        "device": device_name(config.device),
        "gpus": gpu_state(),
        "cpu": _cpu(),
        "ranks": rendezvous.topology.world,
        "nodes": rendezvous.topology.nodes,
        "launcher": rendezvous.launcher,
        "seed": config.seed,
        "config": config.describe(),
        "engine": engine,
        "variables": {key: value for key, value in sorted(os.environ.items()) if key.startswith(_VARIABLES)},
    }


def engine_facts(engine: Engine) -> dict[str, Any]:
    """What an engine's start came to on this rank, in bytes and seconds: its graphs, how memory was divided, and whose
    prefill attention runs."""
    graphs, sizing = engine.executor.decode.graphs.counters, engine.executor.sizing
    return {
        "graphs_captured": graphs.captured - graphs.after_warmup,
        "graph_seconds": graphs.warm_up_s,
        "graph_bytes": graphs.bytes,
        "kv_blocks": sizing.num_blocks,
        "kv_bytes": (sizing.num_blocks + 1) * sizing.shape.block_bytes,
        "activation_bytes": sizing.activation_peak,
        "chain_depth": engine.scheduler.config.limits.depth,
        "horizon": engine.control.horizon,
        "prefill_attention": engine.executor.prefill_attention,
    }


def device_name(device: str) -> str:
    """The GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def gpu_state() -> list[dict[str, str]] | None:
    """Name, driver, clocks, power limit and temperature of each GPU now; None without nvidia-smi."""
    answer = _answer("nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader")
    if answer is None:
        return None
    keys = _CLOCKS.split(",")
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def process_age() -> float:
    """Seconds since this process began, to about 10 ms; where /proc does not say, since this file was imported."""
    since_import = time.perf_counter() - _IMPORTED_AT
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of the line, in ticks after boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        return since_import
    plausible = since_import <= age + 0.01 and age <= since_import + _LONGEST_IMPORTS  # some sandboxes make numbers up
    return age if plausible else since_import


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _commit() -> str | None:
    """The commit of this source tree, with ``-dirty`` where it has changes."""
    here = str(Path(__file__).resolve().parents[2])
    return _answer("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _answer(*command: str) -> str | None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()
