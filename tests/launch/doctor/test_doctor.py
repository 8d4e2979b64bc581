"""`doctor`: what it finds on this machine, and what it says of machines that lack something."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.cli import parse
from launch.doctor import command as doctor
from launch.doctor import gpus as doctor_gpus
from launch.doctor import host as doctor_host
from launch.doctor import software as doctor_software
from launch.doctor.findings import Finding, Level, Section, worst
from launch.doctor.host import AgreeTimes
from launch.doctor.options import DoctorCommand
from launch.doctor.software import own_requirements, parse_requirement, software
from tests.launch.api.parsed import parsed

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-15\t0\t\tN/A
GPU2\tSYS\tNV18\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Control sockets of these tests lie apart from those of other processes, under a path short enough for them."""
    with tempfile.TemporaryDirectory(prefix="ls-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


def errors(sections: list[Section]) -> list[Finding]:
    return [f for section in sections for f in section.findings if f.level is Level.ERROR]


def the(sections: list[Section], title: str) -> Section:
    return next(section for section in sections if section.title == title)


def test_this_machine_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(DoctorCommand(json=True, measure=False), {}) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["can_run"] is True
    titles = [section["title"] for section in said["sections"]]
    assert titles[:5] == ["Software", "Machine", "Network", "Launcher", "Control plane"]
    facts = {section["title"]: section["facts"] for section in said["sections"]}
    assert facts["Software"]["torch"] == version("torch"), "torch.__version__ may name a build, too"
    assert torch.__version__.startswith(facts["Software"]["torch"])
    assert 0 < facts["Control plane"]["agree_p50_us"] <= facts["Control plane"]["agree_p99_us"]
    assert facts["Kernels"]["chosen"], "the kernels that would run"
    assert "--fp8-activations" in facts["Kernels"]["fp8_weights"]
    assert all(f["advice"] for s in said["sections"] for f in s["findings"] if f["level"] in ("warning", "error"))


def test_this_machine_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(parsed(DoctorCommand, ["doctor", "--no-measure"]), {}) == 0
    said = capsys.readouterr().out
    assert "two processes agree in" in said
    assert "supported architectures: Ernie4_5ForCausalLM, " in said
    assert said.splitlines()[-1].startswith(("Everything is as it should be", "The runtime can run here"))


def test_of_several_ranks_on_a_node_one_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(DoctorCommand(), {"LOCAL_RANK": "1"}) == 0
    assert doctor.run(DoctorCommand(), {"SLURM_LOCALID": "3"}) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "fits", "does_not"),
    [
        ("torch>=2.11", ["2.11", "2.11.0+cu130", "3.0"], ["2.10.9"]),
        ("flashinfer-python==0.6.13", ["0.6.13", "0.6.13.0"], ["0.6.12", "0.6.13.1"]),
        ("apache-tvm-ffi>=0.1.6,<0.2", ["0.1.6", "0.1.99"], ["0.1.5", "0.2.0"]),
        ("x[extra] ~=4.5.1 ; python_version > '3'", ["4.5.1", "4.5.9"], ["4.6", "4.5.0"]),
        ("nvidia-nccl-cu13==2.28.*", ["2.28.9"], ["2.29"]),
        ("a (!=1.5,>1)", ["1.6"], ["1.5", "1.0"]),
        ("einops", ["0.1"], []),
    ],
)
def test_requirements(line: str, fits: list[str], does_not: list[str]) -> None:
    requirement = parse_requirement(line)
    assert [version for version in fits + does_not if requirement.admits(version)] == fits


def test_what_lockstride_needs_is_read_from_pyproject_or_from_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_tree = own_requirements()
    assert "torch" in [requirement.name for requirement in from_tree[""]]
    assert "flashinfer-python" in [requirement.name for requirement in from_tree["cuda"]]
    lines = [str(r) for r in from_tree[""]] + [f"{r}; extra == 'cuda'" for r in from_tree["cuda"]]
    monkeypatch.setattr(doctor_software, "_required_by", lambda name: lines)
    installed = own_requirements(tmp_path)
    assert [(r.name, r.clauses) for r in installed["cuda"]] == [(r.name, r.clauses) for r in from_tree["cuda"]]
    assert [(r.name, r.clauses) for r in installed[""]] == [(r.name, r.clauses) for r in from_tree[""]]


def pretend_installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    known = doctor_software.installed
    given = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor_software, "installed", lambda name: given[name] if name in given else known(name))


def test_a_package_that_is_needed_always_is_an_error_and_one_for_gpus_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_installed(monkeypatch, msgspec=None, pyzmq="25.1", flashinfer_python="0.6.12")
    found = {f.text: f for f in software(with_gpu=True).findings}
    assert found["msgspec is not installed, Lockstride needs msgspec>=0.20"].level is Level.ERROR
    assert found["pyzmq is 25.1, Lockstride needs pyzmq>=27"].advice == "pip install 'pyzmq>=27'"
    gpu = found["flashinfer-python is 0.6.12, Lockstride needs flashinfer-python==0.6.13"]
    assert gpu.level is Level.WARNING
    assert not any("flashinfer" in f.text for f in software(with_gpu=False).findings)


def test_a_part_of_torch_that_was_changed_under_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, triton="3.5.0", torch="2.11.0+cu130")
    known = doctor_software._required_by
    monkeypatch.setattr(
        doctor_software,
        "_required_by",
        lambda name: ["triton==3.6.0; platform_system == 'Linux'"] if name == "torch" else known(name),
    )
    texts = [f.text for f in software(with_gpu=False).findings if f.level is Level.WARNING]
    assert texts == ["triton is 3.5.0, but torch 2.11.0+cu130 was built for triton==3.6.0"]


def test_without_torch_it_looks_at_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.run(DoctorCommand(), {}) == doctor.CANNOT_RUN
    said = capsys.readouterr().out
    assert "ERROR torch cannot be imported" in said
    assert "Network" in said
    assert said.endswith("The runtime cannot run here as it is.\n")


def test_a_control_directory_that_others_may_enter(own_directory: Path) -> None:
    open_to_all = own_directory / "control"
    open_to_all.mkdir(mode=0o755)
    (found,) = doctor_host.control(open_to_all).findings
    assert found.level is Level.ERROR
    assert f"chmod 700 {open_to_all}" in found.text


def test_a_control_directory_whose_path_is_too_long(own_directory: Path) -> None:
    (found,) = doctor_host.control(own_directory / ("x" * 100)).findings
    assert found.level is Level.ERROR
    assert "a Unix socket allows 107" in found.text


def test_slow_agreement_is_a_warning(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host, "measure_agreement", lambda folder, seconds: AgreeTimes(1500.0, 9000.0, 5))
    (found,) = doctor_host.control(own_directory / "control").findings
    assert (found.level, found.text) == (
        Level.WARNING,
        "two processes agree in 1500 us (p50; p99 9000 us, 5 turns)",
    )


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host, "_NCCL_SHARED_BYTES", 1 << 60)
    assert any("--shm-size=8g" in f.advice for f in doctor_host.host().findings)
    monkeypatch.setattr(doctor_host, "SHARED_MEMORY", Path("/nowhere"))
    assert any("shared memory at /nowhere cannot be used" in f.text for f in doctor_host.host().findings)


def test_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_host.interface_addresses()["lo"] == "127.0.0.1"
    chosen = doctor_host.network({"LOCKSTRIDE_INTERFACE": "ib7"})
    assert any("the interface ib7 was chosen, but has no IPv4 address" in f.text for f in chosen.findings)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    at_home = doctor_host.network({})
    assert any("others could not reach it" in f.text for f in at_home.findings)
    assert not errors([at_home]), "one node is fine"
    monkeypatch.setattr(doctor_host, "interface_addresses", lambda: {"eth0": "10.0.0.1"})
    assert [f.advice for f in errors([doctor_host.network({})])] == ["ip link set lo up"]


def test_an_environment_that_ranks_would_refuse() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    section = doctor_host.launcher({**step, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "2"})
    assert "3 task(s) on 2 node(s)" in errors([section])[0].text


def test_a_short_kill_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host, "kill_wait", lambda: 9)
    section = doctor_host.launcher({})
    assert section.facts["kill_wait_s"] == 9
    assert any(f.advice.startswith("--drain-seconds 6") for f in section.findings)


def hidden_gpus(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> Section:
    monkeypatch.setattr(doctor_gpus, "query", lambda fields: [["NVIDIA H200", "535.1"]])
    monkeypatch.setattr(doctor_gpus, "_usable", lambda: (False, "the driver is too old"))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return doctor_gpus.gpus()


def test_gpus_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (no_cuda,) = errors([hidden_gpus(monkeypatch, None)])
    assert "is a build without CUDA" in no_cuda.text
    (old_driver,) = errors([hidden_gpus(monkeypatch, "13.0")])
    assert "torch cannot use them: the driver is too old" in old_driver.text
    assert "built for CUDA 13.0, the driver is 535.1" in old_driver.advice
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert errors([hidden_gpus(monkeypatch, "13.0")]) == [], "hidden on purpose"


def test_links_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    monkeypatch.setattr(doctor_gpus, "_answer", lambda *command: TOPOLOGY)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    section = doctor_gpus.links()
    assert section.facts["links"][1:] == [
        ["0", "-", "NV18", "SYS"],
        ["1", "NV18", "-", "NV18"],
        ["2", "SYS", "NV18", "-"],
    ]
    assert "cannot read each other's memory: 0-2" in section.findings[0].text
    assert "linked only across processor sockets: 0-2" in section.findings[1].text
    assert "\n    0     -  NV18   SYS\n" in section.as_text()


@pytest.mark.parametrize("text", ["", "GPU0\tX\n", "GPU0 X NV18\nGPU1 NV18\n", "no devices were found"])
def test_a_topology_that_cannot_be_read_is_left_out(text: str) -> None:
    assert doctor_gpus.topology_matrix(text, [0, 1]) == []


def test_links_of_visible_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert doctor_gpus.topology_matrix(TOPOLOGY, doctor_gpus.visible_indices(2)) == [["-", "NV18"], ["NV18", "-"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-12ab,GPU-34cd")
    assert doctor_gpus.topology_matrix(TOPOLOGY, doctor_gpus.visible_indices(2)) == []


def test_findings_as_text_and_their_order() -> None:
    section = Section("Things", {"a": 1, "longer": None, "rows": [{"x": 1.23456, "y": True}]})
    assert worst([section]) is Level.OK
    section.note("so it is")
    section.warn("slow", "hurry")
    assert worst([section, Section("Empty")]) is Level.WARNING
    section.error("broken", "mend it")
    assert worst([section]) is Level.ERROR
    assert section.as_text().splitlines() == [
        "Things",
        "  a       1",
        "  longer  -",
        "  rows",
        "    x 1.235, y yes",
        "     note so it is",
        "  WARNING slow",
        "          -> hurry",
        "    ERROR broken",
        "          -> mend it",
    ]


def test_help_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["doctor", "--help"])
    said: Any = " ".join(capsys.readouterr().out.split())
    assert "Exit code: 0 the runtime can run here" in said
