"""What an engine is told of where its rank is.

Knows: what ``open_engine`` gives ``build_engine``. Does not know: any engine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.ranks import start_engine
from launch.ranks.rendezvous import Rendezvous
from parallel.topology import Topology
from runtime.config import EngineConfig


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
