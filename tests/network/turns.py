"""The control plane alone, on two hosts with two ranks each: how long a turn takes, and who had to wait for a record.

Knows: four ranks that take turns over `open_control`, and a step of fixed length in each. Does not know: engines,
models; what the link does meanwhile (hosts.py).

Activations would pay for a slow link, too, so there are none here: a step is a sleep, and its collective is this
process, which lets the ranks go on when the last one has come. Nothing but records and acknowledgements crosses the
link. Steps are not chained: with a chain, the device would have more to do while a rank waits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from parallel.control.connect import open_control
from parallel.control.follower_plane import FollowerPlane
from parallel.control.interface import FollowerLink
from parallel.control.protocol.handshake import Identity
from parallel.control.protocol.states import Limits
from parallel.topology import Topology
from tests.network.hosts import HOSTS, TwoHosts
from tests.parallel.control.ranks import FileStore

RANKS = 2  # on each host
WARM_UP = 10  # turns at the start that do not count
_WORLD = RANKS * len(HOSTS)
_ROOT = Path(__file__).parents[2]


class Turns(NamedTuple):
    """``seconds``: a turn of rank 0, on average. ``waited``: for each rank, the share of turns in which the record that
    it needed was not there yet. ``effects``: for each rank, a digest of all that took effect.
    """

    seconds: float
    waited: tuple[float, ...]
    effects: tuple[str, ...]


def take_turns(hosts: TwoHosts, delay_ms: float, horizon: int, turns: int, step_seconds: float) -> Turns:
    """Runs the ranks over a link with this one-way delay. They meet before it is there, which would take seconds."""
    with _ranks(hosts, horizon, turns, step_seconds) as ranks:
        for turn in range(WARM_UP + turns):
            for rank in ranks:
                assert rank.stdout is not None
                assert rank.stdout.readline() == "come\n", "a rank ended early: its stderr is above"
            if turn == 0:
                hosts.link(delay_ms=delay_ms)
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write("go\n")
                rank.stdin.flush()
        hosts.link(delay_ms=0)
        found = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
        assert [rank.wait() for rank in ranks] == [0] * _WORLD
    return Turns(
        seconds=fmean(found[0]["seconds"]),
        waited=tuple(each["waited"] / turns for each in found),
        effects=tuple(each["effects"] for each in found),
    )


@contextmanager
def _ranks(hosts: TwoHosts, horizon: int, turns: int, step_seconds: float) -> Iterator[list[subprocess.Popen[str]]]:
    folder = Path(tempfile.mkdtemp(prefix="ls-"))
    (folder / "store").mkdir()
    ranks = []
    try:
        for rank in range(_WORLD):
            words = [str(word) for word in (rank, horizon, turns, step_seconds, folder, hosts.address(0))]
            command = [*hosts.on(rank // RANKS), sys.executable, "-m", "tests.network.turns", *words]
            environ = os.environ | {"PYTHONPATH": str(_ROOT)}
            ranks.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=environ
                )
            )
        yield ranks
    finally:
        for process in ranks:
            with process:
                process.kill()
        shutil.rmtree(folder)


# ---- one rank ----


class _Watched:
    """A follower's link that notes when the follower had to wait."""

    def __init__(self, link: FollowerLink) -> None:
        self.waited = False
        self._link = link
        self.send, self.process, self.flush, self.close = link.send, link.process, link.flush, link.close

    def receive(self, timeout: float) -> bytes | None:
        data = self._link.receive(0.0)
        if data is None and timeout > 0.0:
            self.waited = True
            data = self._link.receive(timeout)
        return data


def main(rank: int, horizon: int, turns: int, step_seconds: float, folder: Path, address: str) -> None:
    host = rank // RANKS
    place = Topology(rank, _WORLD, rank % RANKS, RANKS, host, len(HOSTS))
    identity = Identity(1, 0, _WORLD, horizon, "turns", "none", "none")
    directory = folder / str(host)
    seconds, waited, effects = list[float](), 0, hashlib.blake2b()
    with open_control(place, identity, directory, Limits(), FileStore(folder / "store"), address) as plane:
        link = None
        if isinstance(plane, FollowerPlane):
            link = plane.link = _Watched(plane.link)
        for turn in range(WARM_UP + turns):
            began = time.monotonic()
            if link is not None:
                link.waited = False
            payload = f"events of turn {turn}".encode() if rank == 0 and turn % 3 == 0 else b""
            effects.update(b"%d:%s;" % (turn, plane.exchange(turn, turn, payload)))
            time.sleep(step_seconds)
            print("come", flush=True)
            sys.stdin.readline()
            if turn >= WARM_UP:
                seconds.append(time.monotonic() - began)
                waited += link is not None and link.waited
        if rank == 0:
            plane.stop()
        turn = WARM_UP + turns
        while not plane.stopped:
            plane.exchange(turn, turn)
            turn += 1
    print(json.dumps({"seconds": seconds, "waited": waited, "effects": effects.hexdigest()}), flush=True)


if __name__ == "__main__":
    _rank, _horizon, _turns, _step, _folder, _address = sys.argv[1:]
    main(int(_rank), int(_horizon), int(_turns), float(_step), Path(_folder), _address)
