"""`doctor`: what this machine offers, what is wrong with it, and what to do about that.

Knows: what is looked at and in which order, the exit code. Does not know: how anything is found out (doctor_*.py).

It goes as far as it can: without torch it says so and looks at the rest, and without a GPU there is less to see.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping

from launch.doctor.findings import Level, Section, worst
from launch.doctor.host import control, host, launcher, network
from launch.doctor.options import DoctorCommand
from launch.doctor.software import software, torch_facts
from launch.values import variable

CANNOT_RUN = 1
_VERDICTS = {
    Level.OK: "Everything is as it should be.",
    Level.NOTE: "The runtime can run here.",
    Level.WARNING: "The runtime can run here; the warnings say what would be slow or fail under load.",
    Level.ERROR: "The runtime cannot run here as it is.",
}


def run(command: DoctorCommand, environ: Mapping[str, str] | None = None) -> int:
    """Look at everything and print it; returns the exit code. Of several ranks on a node, the first one speaks."""
    environ = os.environ if environ is None else environ
    if variable(environ, "LOCAL_RANK", "SLURM_LOCALID") > 0:
        return 0
    sections = look(environ, measure=command.measure)
    verdict = worst(sections)
    if command.json:
        shown = {"verdict": verdict.value, "can_run": verdict is not Level.ERROR}
        print(json.dumps({**shown, "sections": [section.as_json() for section in sections]}))
    else:
        print("\n\n".join(section.as_text() for section in sections))
        print(f"\n{_VERDICTS[verdict]}", flush=True)
    return CANNOT_RUN if verdict is Level.ERROR else 0


def look(environ: Mapping[str, str], *, measure: bool = True) -> list[Section]:
    """Every section, in reading order. ``measure``: also what takes a second or more a GPU."""
    programs = software(with_gpu=shutil.which("nvidia-smi") is not None)
    sections = [programs, host(), network(environ), launcher(environ)]
    if not torch_facts(programs):
        return sections
    from launch.ranks.start_engine import control_directory  # this and the rest need torch
    from models.registry import ARCHITECTURES

    programs.ok(f"supported architectures: {', '.join(sorted(ARCHITECTURES))}")
    sections.append(control(control_directory()))
    sections += _devices(measure)
    return sections


def _devices(measure: bool) -> list[Section]:
    import torch

    from launch.doctor.ceilings import ceilings
    from launch.doctor.gpus import gpus, kernels, links

    found = gpus()
    count = found.facts["gpus"]
    sections = [found]
    if count > 1:
        sections.append(links())
    if count and measure:
        sections.append(ceilings(count))
    sections.append(kernels(torch.device("cuda", 0) if count else torch.device("cpu")))
    return sections
