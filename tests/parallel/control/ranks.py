"""Ranks as threads of one process, over real sockets: quick to start, and each has a control plane of its own."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from parallel.control.connect import open_control
from parallel.control.interface import ControlPlane
from parallel.control.protocol.handshake import Identity
from parallel.control.protocol.states import Limits
from parallel.topology import Topology

PATIENCE_S = 240.0  # only ends tests that hang: a machine may be busy with other things
IDENTITY = Identity(job=0xFEED, epoch=0, world=2, horizon=1, config="c0", model="m0", code="x0")
LIMITS = Limits(deadline=PATIENCE_S, resend=0.5, divergence=1.0, spin=0.0, start=PATIENCE_S)

Result = TypeVar("Result")


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder for sockets: pytest's own names can be too long for a Unix socket's path."""
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        yield Path(folder)


def in_threads(bodies: Mapping[int, Callable[[], Result]]) -> dict[int, Result | Exception]:
    """Runs every body at once; what each returned or raised."""
    ended: dict[int, Result | Exception] = {}

    def run(rank: int) -> None:
        try:
            ended[rank] = bodies[rank]()
        except Exception as error:
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * PATIENCE_S)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return ended


def run_ranks(
    world: int,
    directory: Path,
    body: Callable[[ControlPlane], Result],
    *,
    horizon: int = 1,
    limits: Limits = LIMITS,
    odd: Mapping[int, Identity] | None = None,
    absent: tuple[int, ...] = (),
    groups: int = 1,
    odd_groups: Mapping[int, int] | None = None,
) -> dict[int, Result | Exception]:
    """``world`` ranks of one node, each running ``body``. ``odd`` ranks have another identity, ``absent`` stay away."""

    def rank_body(rank: int) -> Callable[[], Result]:
        def run() -> Result:
            identity = (odd or {}).get(rank, identity_of(world, horizon))
            number = (odd_groups or {}).get(rank, groups)
            with open_control(Topology(rank, world, rank, world), identity, directory, limits, groups=number) as plane:
                return body(plane)

        return run

    return in_threads({rank: rank_body(rank) for rank in range(world) if rank not in absent})


class ThreadStore:
    """What of torch.distributed's TCPStore the control plane uses, for ranks that are threads."""

    def __init__(self) -> None:
        self.content: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.content[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.content, timeout=PATIENCE_S):
                raise TimeoutError(f"nobody set {key}")
            return self.content[key].encode()


class FileStore:
    """The same for ranks that are processes of one machine: one file a key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: str) -> None:
        path = self.folder / key.replace("/", "_")
        path.with_suffix(".new").write_text(value)
        path.with_suffix(".new").rename(path)

    def get(self, key: str) -> bytes:
        path, until = self.folder / key.replace("/", "_"), time.monotonic() + PATIENCE_S
        while not path.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"no rank set {key}")
            time.sleep(0.005)
        return path.read_bytes()


def run_nodes(
    nodes: int,
    local: int,
    directory: Path,
    body: Callable[[ControlPlane], Result],
    *,
    horizon: int = 1,
    limits: Limits = LIMITS,
    odd: Mapping[int, Identity] | None = None,
    store: ThreadStore | None = None,
    groups: int = 1,
) -> dict[int, Result | Exception]:
    """``nodes`` nodes of ``local`` ranks each, over Unix sockets within and ZeroMQ on loopback between."""
    shared, world = store or ThreadStore(), nodes * local

    def rank_body(rank: int) -> Callable[[], Result]:
        def run() -> Result:
            place = Topology(rank, world, rank % local, local, rank // local, nodes)
            identity = (odd or {}).get(rank, identity_of(world, horizon))
            own = directory / f"node{place.node_rank}"
            with open_control(place, identity, own, limits, shared, "127.0.0.1", groups) as plane:
                return body(plane)

        return run

    return in_threads({rank: rank_body(rank) for rank in range(world)})


def identity_of(world: int, horizon: int = 1) -> Identity:
    return replace(IDENTITY, world=world, horizon=horizon)


def take_turns(
    plane: ControlPlane, submitted: list[bytes], digests: Callable[[int], int] = lambda step: step
) -> list[bytes]:
    """One turn for each payload (the leader submits them), then an agreed stop. Returns what took effect."""
    effects = []
    step = 0
    while not plane.stopped:
        payload = b""
        if plane.rank == 0:
            payload = submitted[step] if step < len(submitted) else b""
            if step == len(submitted):
                plane.stop()
        effects.append(plane.exchange(step, digests(step), payload))
        step += 1
    return effects
