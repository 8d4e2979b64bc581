"""Versions, and whether they fit: what pyproject.toml asks for, what torch asks for, what is installed.

Knows: requirement lines, where both sets of them are written down. Does not know: torch (it is only imported, and asked
for its own versions), devices.

What fits is not repeated here: pyproject.toml of a source tree, or the installed package's copy of it, is the list.
"""

from __future__ import annotations

import platform
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

from launch.doctor.findings import Section

_LINE = re.compile(r"^\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")
_CLAUSE = re.compile(r"(===|==|>=|<=|!=|~=|<|>)\s*([^\s]+)")
_OF_TORCH = ("triton", "nvidia-nccl", "nvidia-cudnn")  # what of torch's own requirements is worth a finding


class Requirement(NamedTuple):
    """``torch>=2.11``: its name, its clauses ((">=", "2.11"),), and its marker."""

    name: str
    clauses: tuple[tuple[str, str], ...]
    marker: str = ""

    def __str__(self) -> str:
        return self.name + ",".join(operator + wanted for operator, wanted in self.clauses)

    def admits(self, found: str) -> bool:
        return all(_holds(operator, found, wanted) for operator, wanted in self.clauses)


def parse_requirement(line: str) -> Requirement:
    """Raises ValueError for what is no requirement."""
    match = _LINE.match(line)
    if match is None:
        raise ValueError(f"{line!r} is no requirement")
    clauses = tuple((operator, wanted.rstrip(",")) for operator, wanted in _CLAUSE.findall(match[2].replace(",", " ")))
    return Requirement(match[1], clauses, (match[3] or "").strip())


def own_requirements(root: Path | None = None) -> dict[str, list[Requirement]]:
    """Of Lockstride: what it always needs under "", and of each extra under its name."""
    file = (root or Path(__file__).resolve().parents[2]) / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        groups = {"": project["dependencies"], **project.get("optional-dependencies", {})}
        return {extra: [parse_requirement(line) for line in lines] for extra, lines in groups.items()}
    found: dict[str, list[Requirement]] = {"": []}
    for requirement in map(parse_requirement, _required_by("lockstride")):
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement.marker)
        found.setdefault(extra[1] if extra else "", []).append(requirement)
    return found


def software(with_gpu: bool) -> Section:
    """Needs no torch. ``with_gpu``: there is a GPU, so that the extra for GPUs counts."""
    section = Section("Software")
    section.facts["python"] = platform.python_version()
    section.facts["system"] = platform.platform()
    groups = own_requirements()
    needed = [(requirement, True) for requirement in groups[""]]
    needed += [(requirement, False) for requirement in groups.get("cuda", []) if with_gpu]
    fitting = 0
    for requirement, vital in needed:
        found = installed(requirement.name)
        section.facts[requirement.name] = found
        if found is not None and requirement.admits(found):
            fitting += 1
            continue
        text = f"{requirement.name} is {found or 'not installed'}, Lockstride needs {requirement}"
        advice = f"pip install '{requirement}'"
        section.error(text, advice) if vital else section.warn(text, advice)
    section.ok(f"{fitting} of {len(needed)} required packages are there and fit")
    _check_torch_parts(section)
    return section


def torch_facts(section: Section) -> bool:
    """Imports torch and adds what it says of itself; False, with an error, where it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        section.error(
            f"torch cannot be imported: {type(error).__name__}: {error}",
            "install it anew (pip install --force-reinstall torch) and look at LD_LIBRARY_PATH",
        )
        return False
    any_torch: Any = torch  # untyped in parts
    section.facts["torch_cuda"] = any_torch.version.cuda
    section.facts["nccl"] = _nccl_version(any_torch)
    section.facts["cudnn"] = any_torch.backends.cudnn.version() if any_torch.version.cuda else None
    for name, package in (("triton", "triton"), ("flashinfer", "flashinfer-python")):
        if installed(package) is not None and any_torch.version.cuda:
            _check_import(section, name)
    return True


def installed(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _check_torch_parts(section: Section) -> None:
    """torch's wheels ask for exact versions of their parts; a part that another package changed breaks at run time."""
    for requirement in map(parse_requirement, _required_by("torch")):
        if not requirement.name.startswith(_OF_TORCH) or "extra ==" in requirement.marker:
            continue
        found = installed(requirement.name)
        if found is not None:
            section.facts[requirement.name] = found
        if found is not None and not requirement.admits(found):
            section.warn(
                f"{requirement.name} is {found}, but torch {installed('torch')} was built for {requirement}",
                f"pip install '{requirement}'",
            )


def _check_import(section: Section, name: str) -> None:
    try:
        __import__(name)
    except Exception as error:
        section.warn(
            f"{name} is installed, but cannot be imported: {type(error).__name__}: {error}",
            "the torch reference would run instead, several times slower: pip install 'lockstride[cuda]'",
        )


def _nccl_version(torch: Any) -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _required_by(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def _holds(operator: str, found: str, wanted: str) -> bool:
    if operator == "==" and wanted.endswith(".*"):
        prefix = _release(wanted[:-2])
        return _release(found)[: len(prefix)] == prefix
    width = max(len(_release(found)), len(_release(wanted)))
    a, b = (release + (0,) * (width - len(release)) for release in (_release(found), _release(wanted)))
    if operator == "~=":
        prefix = _release(wanted)[:-1]
        return a >= b and a[: len(prefix)] == prefix
    return {"==": a == b, "===": found == wanted, "!=": a != b, ">=": a >= b, "<=": a <= b, ">": a > b, "<": a < b}[
        operator
    ]


def _release(text: str) -> tuple[int, ...]:
    """``2.11.0+cu130`` to (2, 11, 0): builds and pre-releases of a version count as that version."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
