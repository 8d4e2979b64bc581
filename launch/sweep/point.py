"""A point of a sweep: its settings, the key that names them, and the command that measures it.

Knows: short names of settings and the flags they stand for, how ranks are started on one node.
Does not know: where settings come from (grid.py), where results are kept (ledger.py), Slurm.

The key is a hash of the settings in canonical JSON: the same settings in any order have the same key, on any machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from launch.bench.options import parse_bench

Setting = str | int | float | bool
Measurement = Literal["latency", "throughput", "serve"]

FORMAT = 1  # of what is hashed
RANKS = ("tp", "ep", "dp")
_SHORT = {
    "batch-size": "batch",
    "max-concurrency": "concurrency",
    "chain-depth": "depth",
    "tensor-parallel-size": "tp",
    "expert-parallel-size": "ep",
    "data-parallel-size": "dp",
    "max-num-batched-tokens": "max-prefill-tokens",
    "gpu-memory-utilization": "memory-fraction",
    "enable-prefix-caching": "prefix-caching",
    "url": "base-url",
}
_FLAGS = {
    "batch": "--batch-size",
    "concurrency": "--max-concurrency",
    "depth": "--chain-depth",
    "max-prefill-tokens": "--max-num-batched-tokens",
}
_ON_ONLY = {"profile", "roofline", "save-detailed"}  # switches that have no opposite
_OWN = {
    "result-dir": "the sweep chooses where results go",
    "tensor-parallel": "write tp",
    "expert-parallel": "write ep: 1, or as many as ranks",
    "data-parallel": "write dp",
    "help": "type python -m launch bench latency --help",
}


class SweepError(ValueError):
    """A grid, a ledger or a command line that cannot be used; the text says where and what to write instead."""


def short_name(name: str) -> str:
    """The one name of a setting, whichever of its spellings was used. Raises SweepError for the sweep's own."""
    name = name.replace("_", "-")
    if name in _OWN:
        raise SweepError(f"{name!r} cannot be set: {_OWN[name]}")
    return _SHORT.get(name, name)


@dataclass(frozen=True)
class Point:
    """One measurement. ``settings`` by short name; ``tp``, ``ep`` and ``dp`` are always there.

    Raises SweepError for degrees of parallelism that do not fit each other.
    """

    bench: Measurement
    settings: Mapping[str, Setting]

    def __post_init__(self) -> None:
        settings: dict[str, Setting] = {**dict.fromkeys(RANKS, 1), **self.settings}
        tp, dp = settings["tp"], settings["dp"]
        if "ep" not in self.settings and type(tp) is type(dp) is int and dp > 1:
            settings["ep"] = tp * dp  # groups share the experts
        for name in RANKS:
            value = settings[name]
            if type(value) is not int or value < 1:
                raise SweepError(f"{name} is {value!r}, but must be a whole number from 1")
        for name, value in settings.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise SweepError(f"{name} is {value}, but must be a finite number")
        object.__setattr__(self, "settings", MappingProxyType(settings))
        if self.dp > 1 and self.ep != self.ranks:
            raise SweepError(f"ep is {self.ep}, but groups share the experts: leave it out, or write {self.ranks}")
        if self.dp == 1 and self.ep not in (1, self.tp):
            raise SweepError(f"ep is {self.ep}, but must be 1, or tp, which is {self.tp}")

    @property
    def tp(self) -> int:
        return int(self.settings["tp"])

    @property
    def ep(self) -> int:
        return int(self.settings["ep"])

    @property
    def dp(self) -> int:
        return int(self.settings["dp"])

    @property
    def ranks(self) -> int:
        """Processes, and GPUs where there are any."""
        return self.tp * self.dp

    @property
    def canonical(self) -> bytes:
        """What is hashed: JSON with sorted keys and no blanks."""
        content = {"bench": self.bench, "format": FORMAT, "settings": dict(self.settings)}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @cached_property
    def key(self) -> str:
        """16 hexadecimal digits."""
        return blake2b(self.canonical, digest_size=8).hexdigest()

    def flags(self, results: str) -> list[str]:
        """The arguments after ``python -m launch``; ``results`` is the folder that they name."""
        return ["bench", self.bench, *self._setting_flags(), "--result-dir", results]

    def _setting_flags(self) -> list[str]:
        found = ["--tensor-parallel-size", str(self.tp)]
        if self.dp > 1:
            found += ["--data-parallel-size", str(self.dp)]
        elif self.ep > 1:
            found.append("--expert-parallel")
        for name, value in sorted(self.settings.items()):
            if name in RANKS:
                continue
            flag = _FLAGS.get(name, f"--{name}")
            if value is True:
                found.append(flag)
            elif value is False:
                found += [] if name in _ON_ONLY else [f"--no-{name}"]
            else:
                found += [flag, str(value)]
        return found

    def check(self) -> None:
        """Raises SweepError when `launch bench` would not read this point's command line."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                parse_bench(self.flags("results"))
            except SystemExit:
                reason = said.getvalue().rpartition("error: ")[2].strip()
                raise SweepError(f"point {self.label(self.settings)}: launch bench {self.bench}: {reason}") from None

    def label(self, names: Mapping[str, Setting] | tuple[str, ...], models: Mapping[str, str] | None = None) -> str:
        """Some of the settings for people: ``tp2 batch8 qwen3-8b``. ``models``: see model_names."""
        shown = {name: shown_setting(name, self.settings[name]) for name in names if name in self.settings}
        if models and "model" in shown:
            shown["model"] = models[str(self.settings["model"])]
        return " ".join(shown.values())


def model_names(models: Iterable[str]) -> dict[str, str]:
    """Model -> its name for people: the last folder of its path, with as many before it as distinguish it."""
    parts = {model: Path(model).parts for model in models}
    names = {}
    for model, own in parts.items():
        others = [path for other, path in parts.items() if other != model]
        enough = (n for n in range(1, len(own) + 1) if all(path[-n:] != own[-n:] for path in others))
        names[model] = str(Path(*own[-next(enough, len(own)) :]))
    return names


def models_of(points: Iterable[Point]) -> dict[str, str]:
    """The names of their models."""
    return model_names({str(point.settings["model"]) for point in points if "model" in point.settings})


def shown_setting(name: str, value: Setting) -> str:
    """``tp2``, ``model=qwen3-8b``: numbers need no sign between."""
    if name == "model":
        return Path(str(value)).name
    if type(value) is bool:
        return name if value else f"no {name}"
    return f"{name}{value}" if isinstance(value, int) else f"{name}={value}"


def local_command(point: Point, folder: Path) -> list[str]:
    """The processes of a point on this machine; logs of ranks and results go below ``folder``."""
    flags = point.flags(str(folder / "results"))
    if point.ranks == 1:
        return [sys.executable, "-m", "launch", *flags]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(point.ranks)]
    logs = ["--log-dir", str(folder / "ranks"), "--tee", "3", "--local-ranks-filter", "0"]
    return [*torchrun, *logs, "-m", "launch", *flags]
