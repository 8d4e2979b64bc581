"""The GPUs: which there are, who else uses them, how they are linked, and which kernels would run on them.

Knows: torch.cuda's and nvidia-smi's view of devices. Does not know: how fast they are (ceilings.py).
"""

from __future__ import annotations

import logging
import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch

from launch.doctor.findings import Section
from launch.ranks.flashinfer_switches import flashinfer_switches
from models.ops.select import fp8_path, select_kernels
from runtime.config import EngineConfig
from runtime.number_text import is_whole_number

_SECONDS = 20.0  # for nvidia-smi: its first call wakes sleeping GPUs
_BUSY_BYTES = 2 << 30  # a context and a desktop fit in; another job does not
_HIDING = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that mean none
_SHOWN_SHAPES = ((torch.bfloat16, 128), (torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 128))


def gpus() -> Section:
    """Needs torch; where there is no GPU it says so in one line."""
    section = Section("GPUs")
    listed = query("name,driver_version")
    usable, complaint = _usable()
    section.facts["gpus"] = torch.cuda.device_count() if usable else 0
    if not usable:
        _judge_unusable(section, listed, complaint)
        return section
    section.facts["driver"] = listed[0][1] if listed else None
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        rows.append(
            {
                "index": index,
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "free_gib": round(free / 2**30, 1),
                "total_gib": round(total / 2**30, 1),
            }
        )
        if total - free > _BUSY_BYTES:
            section.warn(
                f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB of GPU {index} are in use by others",
                "nvidia-smi shows by whom; or take less: --memory-fraction "
                f"{max(0.05, 0.95 * free / total - 0.02):.2f}",
            )
    section.facts["devices"] = rows
    if len({row["name"] for row in rows}) > 1:
        section.warn(
            "the GPUs differ: ranks of one model wait for the slowest", "choose equal ones with CUDA_VISIBLE_DEVICES"
        )
    _clocks(section)
    return section


def links() -> Section:
    """Which GPU reaches which, and over what. Two GPUs or more."""
    section = Section("Links between GPUs")
    count = torch.cuda.device_count()
    reach = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    topology = topology_matrix(_answer("nvidia-smi", "topo", "-m") or "", visible_indices(count))
    names = topology or [["P2P" if there else "none" for there in row] for row in reach]
    section.facts["peer_access"] = reach
    section.facts["links"] = [["", *map(str, range(count))], *([str(a), *row] for a, row in enumerate(names))]
    apart = [f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not reach[a][b]]
    if apart:
        section.warn(
            f"these GPUs cannot read each other's memory: {', '.join(apart[:8])}{', ...' if len(apart) > 8 else ''}; "
            "what ranks exchange goes through the host",
            "switch ACS off in the BIOS and IOMMU off on bare metal; in a container pass all GPUs of a link domain",
        )
    slow = [f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if topology and topology[a][b] == "SYS"]
    if slow:
        section.warn(
            f"these GPUs are linked only across processor sockets: {', '.join(slow[:8])}",
            "keep the ranks of one model on GPUs that are linked better (CUDA_VISIBLE_DEVICES)",
        )
    if topology and not apart and all(name.startswith("NV") for name in _pairs(topology)):
        section.ok(f"all {count} GPUs are linked by NVLink")
    return section


def kernels(device: torch.device) -> Section:
    """What would run on this device."""
    section = Section("Kernels")
    chosen = []
    for dtype, head_dim in _SHOWN_SHAPES if device.type == "cuda" else ((torch.float32, 128),):
        with _heard("models.ops.select") as warned:
            try:
                selected = select_kernels(device, dtype, head_dim, flashinfer=flashinfer_switches(os.environ))
            except (RuntimeError, OSError) as error:
                section.error(
                    f"the kernels for {dtype} cannot be made: {error}",
                    "look at free memory and at the versions above; --device cpu runs without them",
                )
                continue
        short = str(dtype).removeprefix("torch.")
        chosen.append(
            {"dtype": short, "head_dim": head_dim, "kernels": selected.name, "prefill": selected.prefill_name}
        )
        for text in warned:
            section.note(text)
        section.facts["fp8_weights"] = f"activations {fp8_path(selected)} (--fp8-activations)"
    section.facts["chosen"] = chosen
    if device.type == "cpu":
        section.note("on CPUs everything runs in plain torch: for tests and small models")
        return section
    from models.kernels.matmul.choice_table import machine_table
    from models.kernels.traits import traits_of

    cache = next(field.default for field in fields(EngineConfig) if field.name == "kernel_cache")
    tuned = len(machine_table(Path(str(cache)).expanduser(), traits_of(device)).choices)
    section.facts["tuned_shapes"] = tuned
    if not tuned:
        section.note(
            f"no matrix shapes were measured ahead on a {torch.cuda.get_device_name(device)}: sensible choices are "
            "made without, which may cost some per cent",
            "python -m launch tune --model FOLDER measures a model's, in some minutes",
        )
    return section


def query(fields: str) -> list[list[str]]:
    """nvidia-smi's rows for these fields, one a visible GPU; none where it does not answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = ["-i", visible] if visible and visible not in _HIDING else []
    answer = _answer("nvidia-smi", *chosen, f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return [[part.strip() for part in line.split(",")] for line in (answer or "").splitlines() if line.strip()]


def visible_indices(count: int) -> list[int]:
    """nvidia-smi's numbers of torch's GPUs 0 .. ``count`` - 1; empty where they are given by other names."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(range(count))
    parts = named.split(",")
    return [int(part) for part in parts] if len(parts) == count and all(map(is_whole_number, parts)) else []


def topology_matrix(text: str, indices: list[int]) -> list[list[str]]:
    """``nvidia-smi topo -m`` as names of links between the GPUs ``indices``; empty where it cannot be read so."""
    rows = {row[0]: row[1:] for row in (line.split() for line in text.splitlines()) if row and row[0].startswith("GPU")}
    try:
        matrix = [[rows[f"GPU{a}"][b] for b in indices] for a in indices]
    except (KeyError, IndexError):
        return []
    return [["-" if name == "X" else name for name in row] for row in matrix]


def _usable() -> tuple[bool, str]:
    """Whether torch can use a GPU, and what it complains of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    return usable, "; ".join(str(warning.message).splitlines()[0] for warning in caught)


def _judge_unusable(section: Section, listed: list[list[str]], complaint: str) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not listed:
        section.note("there is no GPU here: the runtime runs on the CPU (--device cpu, gloo between ranks)")
    elif visible in _HIDING:
        section.note(f"{len(listed)} GPU(s) are here, but CUDA_VISIBLE_DEVICES={visible!r} hides them")
    elif torch.version.cuda is None:
        section.error(
            f"{len(listed)} GPU(s) are here, but torch {torch.__version__} is a build without CUDA",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
        )
    else:
        section.error(
            f"{len(listed)} GPU(s) are here, but torch cannot use them: {complaint or 'it does not say why'}",
            f"torch was built for CUDA {torch.version.cuda}, the driver is {listed[0][1]}: update the driver, or "
            "install a torch for an older CUDA",
        )


def _clocks(section: Section) -> None:
    """What slows a GPU down from outside."""
    for index, row in enumerate(
        query("power.limit,power.default_limit,temperature.gpu,ecc.errors.uncorrected.volatile.total")
    ):
        if len(row) != 4:
            continue
        limit, default, heat, broken = (_number(text) for text in row)
        if limit is not None and default is not None and limit < 0.95 * default:
            section.warn(
                f"GPU {index} may draw {limit:.0f} W, its default is {default:.0f} W: it will be slower",
                f"nvidia-smi -i {index} -pl {default:.0f}, as root",
            )
        if heat is not None and heat >= 85:
            section.warn(f"GPU {index} is at {heat:.0f} degrees C and will slow down", "look at the cooling")
        if broken:
            section.warn(f"GPU {index} has {broken:.0f} uncorrected memory errors", "reset or replace it")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _pairs(matrix: list[list[str]]) -> Iterator[str]:
    for a, row in enumerate(matrix):
        yield from row[a + 1 :]


@contextmanager
def _heard(logger: str) -> Iterator[list[str]]:
    """What the logger says meanwhile, instead of its being printed."""
    said: list[str] = []
    speaker = logging.getLogger(logger)

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, propagated = Listener(), speaker.propagate
    speaker.addHandler(listener)
    speaker.propagate = False
    try:
        yield said
    finally:
        speaker.propagate = propagated
        speaker.removeHandler(listener)


def _answer(*command: str) -> str | None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout
