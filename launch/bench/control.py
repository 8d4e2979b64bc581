"""How long ranks take to agree: the control plane over each of its transports, against gloo and NCCL, in one run.

    python -m launch bench control --ranks 2,4,8 [--turns 5000] [--output out/control.json]

Knows: how each way of agreeing is timed, and that all of them run on this machine with processes of their own.
Does not know: engines or models; what agreement means (parallel/control).

Every way agrees on a few integers, turn after turn. For the control plane, ``agree`` is the time from the moment the
leader begins a turn with an event to the moment the last follower has that event in hand (all processes read one
monotonic clock), ``round`` until the leader also holds every acknowledgement, ``call`` what one ``exchange`` costs the
leader. ``max``: one ``agree_max``, by the rank for which it took longest; ranks begin a turn together, so that this
holds the wait for the last of them. Two nodes are the two halves of the ranks. For the collectives ``agree`` is one
all-reduce (max), as seen by rank 0, from integers on the host to integers on the host; with NCCL that includes both
copies and the wait. Microseconds, p50 and p99.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from parallel.control.connect import open_control
from parallel.control.interface import ControlPlane
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.handshake import Identity
from parallel.control.protocol.states import Limits
from parallel.topology import Topology

WARM_TURNS = 200
_INTEGERS = 4


class FileStore:
    """A rendezvous store for processes of one machine: one file a key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: str) -> None:
        path = self.folder / key.replace("/", "_")
        path.with_suffix(".new").write_text(value)
        path.with_suffix(".new").rename(path)

    def get(self, key: str) -> bytes:
        path, until = self.folder / key.replace("/", "_"), time.monotonic() + 60
        while not path.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"nobody set {key}")
            time.sleep(0.005)
        return path.read_bytes()


# ---- one rank of one measurement: returns {name: microseconds of each turn} ----


def _plane(rank: int, world: int, folder: Path, turns: int, spin: float, nodes: int) -> dict[str, list[float]]:
    """The control plane: ``nodes`` == 1 over Unix sockets, == ``world`` over ZeroMQ with CURVE on loopback TCP."""
    with _opened(rank, world, folder, spin, nodes) as plane:
        return _lead(plane, turns) if isinstance(plane, LeaderPlane) else _follow(plane, turns)


def _opened(rank: int, world: int, folder: Path, spin: float, nodes: int, groups: int = 1) -> ControlPlane:
    local = world // nodes
    identity = Identity(1, 0, world, 1, "bench", "none", "none")
    place = Topology(rank, world, rank % local, local, rank // local, nodes)
    directory, limits = folder / f"node{place.node_rank}", Limits(spin=spin)
    return open_control(place, identity, directory, limits, FileStore(folder), "127.0.0.1", groups)


def _lead(plane: LeaderPlane, turns: int) -> dict[str, list[float]]:
    call, whole = [], []
    reached = plane.machine.reached
    for step in range(turns):
        begin = time.monotonic_ns()
        plane.exchange(step, step, begin.to_bytes(8, "little"))
        call.append((time.monotonic_ns() - begin) / 1e3)
        # A follower that took the record of this turn goes on to the turn after it takes effect in.
        while min(reached.values()) < step + plane.horizon + 1:
            plane.poll()
        whole.append((time.monotonic_ns() - begin) / 1e3)
    plane.stop()
    _run_out(plane, turns)
    return {"call": call, "round": whole}


def _follow(plane: ControlPlane, turns: int) -> dict[str, list[float]]:
    agree = []
    for step in range(turns + plane.horizon):
        payload = plane.exchange(step, step)
        if payload:
            agree.append((time.monotonic_ns() - int.from_bytes(payload, "little")) / 1e3)
    _run_out(plane, turns + plane.horizon)
    return {"agree": agree}


def _run_out(plane: ControlPlane, step: int) -> None:
    while not plane.stopped:
        plane.exchange(step, step)
        step += 1


def _agree_max(rank: int, world: int, folder: Path, turns: int, spin: float, nodes: int) -> dict[str, list[float]]:
    """Every rank a group of its own, eight numbers: what data-parallel ranks pay in each turn."""
    with _opened(rank, world, folder, spin, nodes, groups=world) as plane:
        times = []
        for step in range(turns):
            plane.exchange(step, step)
            mine = ((step * 7 + rank) % 64, rank, *range(6))
            begin = time.monotonic_ns()
            plane.agree_max(step, mine)
            times.append((time.monotonic_ns() - begin) / 1e3)
        if rank == 0:
            plane.stop()
        _run_out(plane, turns)
    return {"max": times}


def _ipc(rank: int, world: int, folder: Path, turns: int) -> dict[str, list[float]]:
    """Bare ZeroMQ ROUTER/DEALER over ipc, spinning: what a hand-written exchange without our frames would cost."""
    import zmq

    address, times = f"ipc://{folder}/agree", []
    with zmq.Context() as context:
        if rank != 0:
            with context.socket(zmq.DEALER) as dealer:
                dealer.connect(address)
                dealer.send(bytes(8 * _INTEGERS))
                for _ in range(turns):
                    dealer.recv()
                    dealer.send(bytes(8 * _INTEGERS))
                dealer.recv()
            return {}
        with context.socket(zmq.ROUTER) as router:
            router.bind(address)
            others = [router.recv_multipart()[0] for _ in range(world - 1)]
            for _ in range(turns):
                begin = time.monotonic_ns()
                for other in others:
                    router.send_multipart((other, bytes(8 * _INTEGERS)))
                for _ in others:
                    while not router.poll(0):
                        pass
                    router.recv_multipart()
                times.append((time.monotonic_ns() - begin) / 1e3)
            for other in others:
                router.send_multipart((other, b"stop"))
    return {"agree": times}


def _collective(rank: int, world: int, folder: Path, turns: int, backend: str) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=rank, world_size=world)
    here = torch.arange(_INTEGERS, pin_memory=backend == "nccl")
    device = torch.zeros_like(here, device="cuda" if backend == "nccl" else "cpu")
    times = []
    for _ in range(turns):
        begin = time.monotonic_ns()
        if backend == "nccl":
            device.copy_(here, non_blocking=True)
            dist.all_reduce(device, dist.ReduceOp.MAX)
            here.copy_(device, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        else:
            dist.all_reduce(here, dist.ReduceOp.MAX)
        times.append((time.monotonic_ns() - begin) / 1e3)
    dist.barrier()
    dist.destroy_process_group()
    return {"agree": times}


WAYS: dict[str, Callable[[int, int, Path, int], dict[str, list[float]]]] = {
    "unix sockets, spin": lambda r, w, f, n: _plane(r, w, f, n, spin=1.0, nodes=1),
    "unix sockets, blocking": lambda r, w, f, n: _plane(r, w, f, n, spin=0.0, nodes=1),
    "zeromq tcp curve, spin": lambda r, w, f, n: _plane(r, w, f, n, spin=1.0, nodes=w),
    "zeromq tcp curve, blocking": lambda r, w, f, n: _plane(r, w, f, n, spin=0.0, nodes=w),
    "maximum, unix sockets, spin": lambda r, w, f, n: _agree_max(r, w, f, n, spin=1.0, nodes=1),
    "maximum, unix sockets, blocking": lambda r, w, f, n: _agree_max(r, w, f, n, spin=0.0, nodes=1),
    "maximum, two nodes, spin": lambda r, w, f, n: _agree_max(r, w, f, n, spin=1.0, nodes=2),
    "maximum, two nodes, blocking": lambda r, w, f, n: _agree_max(r, w, f, n, spin=0.0, nodes=2),
    "zeromq ipc, bare": _ipc,
    "gloo": lambda r, w, f, n: _collective(r, w, f, n, "gloo"),
    "nccl": lambda r, w, f, n: _collective(r, w, f, n, "nccl"),
}


# ---- the run ----


def measure(way: str, world: int, turns: int) -> dict[str, dict[str, float]]:
    """Runs ``way`` with ``world`` processes; {"agree": {"p50", "p99"}, ...} in microseconds."""
    with tempfile.TemporaryDirectory(prefix="lockstride-bench-") as folder:
        command = [sys.executable, "-m", "launch.bench.control", "--rank-of", way, folder, str(world), str(turns)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(world)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"{way} with {world} ranks: exit codes {codes}")
        results = [json.loads((Path(folder) / f"result{rank}.json").read_text()) for rank in range(world)]
    columns: dict[str, list[list[float]]] = {}
    for result in results:
        for name, times in result.items():
            columns.setdefault(name, []).append(times[WARM_TURNS:])
    if way in ("gloo", "nccl"):
        columns = {name: lists[:1] for name, lists in columns.items()}
    return {name: _percentiles([max(turn) for turn in zip(*lists, strict=True)]) for name, lists in columns.items()}


def _percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {name: round(ordered[int(len(ordered) * share)], 1) for name, share in (("p50", 0.5), ("p99", 0.99))}


COLUMNS = ("agree", "round", "call", "max")


def ways_here(world: int) -> tuple[str, ...]:
    """All ways that ``world`` ranks of this machine have: NCCL's needs a GPU for each, two nodes an even number."""
    return tuple(way for way in WAYS if not _lacks(way, world))


def _lacks(way: str, world: int) -> str:
    """Why ``world`` ranks of this machine cannot agree so; nothing where they can."""
    import torch

    if way == "nccl" and world > (gpus := torch.cuda.device_count()):
        return f"each rank needs a GPU, and there are {gpus}: type fewer --ranks or another --way"
    if "two nodes" in way and world % 2:
        return f"each node has half of the ranks: type --ranks {world - 1} or {world + 1}, or another --way"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.bench.control", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--turns", type=int, default=5000)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of is not None:
        way, folder, world, turns, rank = options.rank_of
        result = WAYS[way](int(rank), int(world), Path(folder), int(turns) + WARM_TURNS)
        (Path(folder) / f"result{rank}.json").write_text(json.dumps(result))
        return 0
    return compare(options.ranks, options.turns, options.ways, options.output)


def compare(ranks: Sequence[int], turns: int, ways: Sequence[str], output: Path | None) -> int:
    """Measure every way with every number of ranks; the table on stdout, JSON in ``output``. ``ways`` () is all that
    ``ways_here`` has. Returns the exit code. Raises ValueError for an unknown way, for one that so many ranks do not
    have, for fewer than two ranks and for an ``output`` that cannot be written.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no way to agree; the ways are {', '.join(repr(way) for way in WAYS)}")
    if min(ranks) < 2:
        raise ValueError(f"--ranks {min(ranks)}: one rank has nobody to agree with; type --ranks 2 or more")
    for world in ranks:
        for way in ways:
            if lack := _lacks(way, world):
                raise ValueError(f"--way {way!r} with --ranks {world}: {lack}")
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.open("a").close()  # what an earlier run left stays until there is a row
        except OSError as error:
            raise ValueError(f"--output {output} cannot be written: {error}") from error
    rows = []
    heads = " ".join(f"{name + ' p50':>9} {'p99':>9}" for name in COLUMNS)
    print(f"{'way':31} ranks  {heads}  us")
    for world in ranks:
        for way in ways or ways_here(world):
            measured = measure(way, world, turns)
            rows.append({"way": way, "ranks": world, **measured})
            cells = [f"{measured[n][p]:>9.1f}" if n in measured else " " * 9 for n in COLUMNS for p in ("p50", "p99")]
            print(f"{way:31} {world:>5}  {' '.join(cells)}", flush=True)
            if output is not None:
                told = {"unit": "us", "turns": turns, "cores": os.cpu_count(), "rows": rows}
                output.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
