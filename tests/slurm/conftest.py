"""Fixtures: Slurms that run for the whole session, and what a generate job must answer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs
from tests.slurm.jobs import serial_answers

REQUIRED = os.environ.get("LOCKSTRIDE_SLURM_TESTS") == "required"  # as in CI: what is missing fails instead of skipping


def lacking(what: str) -> None:
    reason = f"{what}; Debian: apt-get install slurmctld slurmd slurm-client munge iproute2"
    if REQUIRED:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes that are all this machine."""
    yield from _running(tmp_path_factory.mktemp("slurm"), namespaces=False)


@pytest.fixture(scope="session")
def network_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with names, addresses and interfaces of their own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        lacking("network namespaces need root and iproute2")
    yield from _running(tmp_path_factory.mktemp("slurm"), namespaces=True)


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    return serial_answers(tmp_path_factory.mktemp("serial"))


def _running(folder: Path, *, namespaces: bool) -> Iterator[Cluster]:
    missing = missing_programs()
    if missing:
        lacking(f"Slurm is not here ({', '.join(missing)})")
    with Cluster(folder, nodes=2 if namespaces else 4, namespaces=namespaces) as running:
        yield running
