"""Fixtures: two hosts for the whole module, and a process on each from which launchers are forked."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.faults.zygote import Zygote
from tests.network.hosts import TwoHosts, lacking
from tests.network.jobs import zygotes_on

REQUIRED = os.environ.get("LOCKSTRIDE_NETWORK_TESTS") == "required"  # as in CI: what is missing fails, not skips


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[TwoHosts]:
    reason = lacking()
    if reason is not None and REQUIRED:
        pytest.fail(reason, pytrace=False)
    if reason is not None:
        pytest.skip(reason)
    with TwoHosts() as made:
        yield made


@pytest.fixture
def hosts(two_hosts: TwoHosts) -> Iterator[TwoHosts]:
    """With the link as it should be, before and after."""
    yield two_hosts
    two_hosts.link(delay_ms=0, loss=0, cut=False)


@pytest.fixture(scope="session")
def zygotes(two_hosts: TwoHosts) -> Iterator[list[Zygote]]:
    with zygotes_on(two_hosts) as made:
        yield made
