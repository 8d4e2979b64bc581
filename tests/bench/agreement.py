"""How long ranks of one machine take to agree over the control plane: the figures of docs/measurements.md.

    python -m tests.bench.agreement [--ranks 2 4 8] [--turns 5000] [--out FILE.json]

Knows: how a turn and an `agree_max` are timed, each rank a process. Does not know: engines, what agreement means
(parallel/control).

``agree``: from the start of the leader's turn, which has an event, until the last follower holds that event (all
processes read one monotonic clock). ``max``: one ``agree_max`` of eight numbers, every rank a data-parallel group; the
slowest rank's time, which holds the wait for the last of them. Microseconds, p50 and p99. Ranks that spin need a core
each; with `two nodes` half of the ranks talk to the other half over ZeroMQ with CURVE on loopback TCP.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from parallel.control.connect import open_control
from parallel.control.interface import ControlPlane
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.handshake import Identity
from parallel.control.protocol.states import Limits
from parallel.topology import Topology
from tests.parallel.control.ranks import FileStore

WARM_TURNS = 200
WAYS = {  # name: number of nodes, seconds of polling before a rank sleeps
    "unix sockets, spin": (1, 1.0),
    "unix sockets, blocking": (1, 0.0),
    "two nodes, spin": (2, 1.0),
    "two nodes, blocking": (2, 0.0),
}


def opened(rank: int, world: int, folder: Path, way: str, groups: int) -> ControlPlane:
    nodes, spin = WAYS[way]
    local = world // nodes
    place = Topology(rank, world, rank % local, local, rank // local, nodes)
    identity = Identity(1, 0, world, 1, "bench", "none", "none")
    directory = folder / f"node{place.node_rank}"
    return open_control(place, identity, directory, Limits(spin=spin), FileStore(folder), "127.0.0.1", groups)


def agree(plane: ControlPlane, rank: int, turns: int) -> list[float]:
    """Of a follower, microseconds from the start of each of the leader's turns to its event. Nothing of the leader,
    which begins a turn when all followers have acknowledged the one before."""
    times = []
    if isinstance(plane, LeaderPlane):
        for step in range(turns):
            plane.exchange(step, step, time.monotonic_ns().to_bytes(8, "little"))
            while min(plane.machine.reached.values()) < step + plane.horizon + 1:
                plane.poll()
        return []
    for step in range(turns + plane.horizon):
        if payload := plane.exchange(step, step):
            times.append((time.monotonic_ns() - int.from_bytes(payload, "little")) / 1e3)
    return times


def agree_max(plane: ControlPlane, rank: int, turns: int) -> list[float]:
    """Microseconds of each."""
    times = []
    for step in range(turns):
        plane.exchange(step, step)
        began = time.monotonic_ns()
        plane.agree_max(step, ((step * 7 + rank) % 64, rank, *range(6)))
        times.append((time.monotonic_ns() - began) / 1e3)
    return times


MEASURES: dict[str, Callable[[ControlPlane, int, int], list[float]]] = {"agree": agree, "max": agree_max}


def one_rank(measure: str, way: str, folder: Path, world: int, turns: int, rank: int) -> None:
    """Writes its times, in microseconds, to a file of ``folder``."""
    with opened(rank, world, folder, way, world if measure == "max" else 1) as plane:
        times = MEASURES[measure](plane, rank, turns + WARM_TURNS)
        if rank == 0:
            plane.stop()
        step = turns + WARM_TURNS + plane.horizon * (rank > 0 and measure == "agree")
        while not plane.stopped:
            plane.exchange(step, step)
            step += 1
    (folder / f"times{rank}.json").write_text(json.dumps(times))


def percentiles(measure: str, way: str, world: int, turns: int) -> dict[str, float]:
    """Of the slowest rank of each turn: {"p50", "p99"}, microseconds. RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        command = [sys.executable, "-m", "tests.bench.agreement", "--rank-of", measure, way, folder]
        ranks = [subprocess.Popen([*command, str(world), str(turns), str(rank)]) for rank in range(world)]
        if any(codes := [rank.wait() for rank in ranks]):
            raise RuntimeError(f"{measure}, {way}, {world} ranks: exit codes {codes}")
        columns = [json.loads((Path(folder) / f"times{rank}.json").read_text()) for rank in range(world)]
    slowest = sorted(max(turn) for turn in zip(*(column[WARM_TURNS:] for column in columns if column), strict=True))
    return {name: round(slowest[int(len(slowest) * share)], 1) for name, share in (("p50", 0.5), ("p99", 0.99))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="two nodes need even numbers")
    parser.add_argument("--turns", type=int, default=5000)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        measure, way, folder, world, turns, rank = args.rank_of
        return one_rank(measure, way, Path(folder), int(world), int(turns), int(rank))
    rows = []
    for world in args.ranks:
        for way in args.ways:
            found = {measure: percentiles(measure, way, world, args.turns) for measure in MEASURES}
            rows.append({"way": way, "ranks": world, **found})
            shown = "   ".join(f"{name} {us['p50']:8.1f} / {us['p99']:8.1f}" for name, us in found.items())
            print(f"{way:24} {world} ranks   {shown} us", flush=True)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(
                    json.dumps({"unit": "us", "turns": args.turns, "cores": os.cpu_count(), "rows": rows})
                )
    return None


if __name__ == "__main__":
    main()
