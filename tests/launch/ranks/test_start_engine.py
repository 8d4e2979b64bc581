"""What an engine is told of where its rank is.

Knows: what ``open_engine`` gives ``build_engine``. Does not know: any engine.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.ranks import start_engine
from launch.ranks.rendezvous import MeetingError, Rendezvous
from parallel.topology import Topology
from runtime.config import EngineConfig
from tests.parallel.control.ranks import LIMITS, identity_of, short_folder


def test_an_engine_knows_its_place_among_the_ranks_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three on the second of two nodes: kernels that are compiled are shared on a node."""
    told: dict[str, Any] = {}
    everybody = SimpleNamespace(all_reduce_min=int, broadcast_text=None)
    fabric = SimpleNamespace(everybody=everybody, collectives=None, exchange=None)
    monkeypatch.setattr(start_engine, "_control", lambda *parts: SimpleNamespace(rank=4))
    monkeypatch.setattr(start_engine, "_watchdog", lambda *parts: None)
    monkeypatch.setattr(start_engine, "_fabric", lambda *parts: fabric)
    monkeypatch.setattr(start_engine, "build_engine", lambda config, **named: told.update(named))
    topology = Topology(rank=4, world=6, local_rank=1, local_world=3, node_rank=1, nodes=2)
    start_engine.open_engine(EngineConfig(model="m", device="cpu"), Rendezvous(topology, "plain"))
    assert (told["local_rank"], told["local_world"]) == (1, 3)


def test_control_sockets_lie_where_this_user_may_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in another user's runtime directory, as after su, nor under a path that is too long for a socket's."""
    name = f"lockstride-{os.geteuid()}"
    foreign, long = tmp_path / "foreign", tmp_path / ("x" * 90)
    with short_folder() as mine:
        for folder in (foreign, long):
            folder.mkdir()
        monkeypatch.setattr(os, "access", lambda path, mode: path != foreign)
        monkeypatch.setattr(tempfile, "tempdir", str(mine))
        for runtime, expected in {
            str(mine / "there"): mine,
            str(foreign): mine,
            str(long): mine,
            "": mine,
            tempfile.gettempdir(): mine,
        }.items():
            monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
            assert start_engine.control_directory() == expected / name
        (mine / "there").mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(mine / "there"))
        assert start_engine.control_directory() == mine / "there" / name
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(foreign))
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        assert start_engine.control_directory() == Path("/tmp") / name


def test_an_unusable_place_for_control_sockets_is_a_user_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_engine, "identity_of", lambda *parts: identity_of(2))
    here = Rendezvous(Topology(world=2, local_world=2), "plain")
    with short_folder() as folder:
        (folder / "file").touch()
        monkeypatch.setattr(start_engine, "control_directory", lambda: folder / "file" / "mine")
        with pytest.raises(MeetingError, match=r"/file/mine cannot be made: Not a directory \(XDG_RUNTIME_DIR and TM"):
            start_engine._control(EngineConfig(model="m", device="cpu"), here, LIMITS)


def test_groups_of_one_rank_are_not_compared_by_their_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's calls are logged at its capture alone: a group that launches a step kernel by kernel which another one
    replays would seem to call something else."""

    class Calling:
        def __init__(self, group: Any) -> None:
            self.calls = SimpleNamespace(snapshot=object())

    exchange = Calling(None)
    groups = SimpleNamespace(world=object(), tensor=None, data=object())
    monkeypatch.setattr(start_engine, "rank_groups", lambda *parts: groups)
    monkeypatch.setattr(start_engine, "GroupCollectives", Calling)
    monkeypatch.setattr(start_engine, "_exchange", lambda *parts: exchange)
    topology = Topology(rank=1, world=2, local_rank=1, local_world=2)
    watchdog: Any = SimpleNamespace(evidence=SimpleNamespace(calls=None))
    config = EngineConfig(model="m", device="cpu", data_parallel=2, expert_parallel=True)
    fabric: Any = start_engine._fabric(config, Rendezvous(topology, "plain"), torch.device("cpu"), watchdog)
    assert fabric.exchange is exchange
    assert watchdog.evidence.calls is fabric.everybody.calls.snapshot
