"""How long two processes of this machine take to agree, over the control plane's own Unix sockets.

Knows: that one process leads and a second one, started here, follows. Does not know: engines, torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from parallel.control.connect import open_control
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.handshake import Identity
from parallel.control.protocol.states import Limits
from parallel.topology import Topology

_LIMITS = Limits(deadline=10.0, start=30.0)
_WARM_UP_TURNS = 100


class AgreeTimes(NamedTuple):
    """Microseconds from the leader's call with an event until the follower holds it."""

    p50_us: float
    p99_us: float
    turns: int


def measure_agreement(folder: Path, seconds: float) -> AgreeTimes:
    """For ``seconds``, after a warm-up. ``folder``: where this user's control sockets lie.

    Raises a ControlError, a SocketPlaceError, or RuntimeError with what the second process said.
    """
    job = os.getpid()
    command = [sys.executable, "-m", __name__, str(folder), str(job)]
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    ) as follower:
        try:
            _lead(folder, job, seconds)
        except BaseException:
            follower.kill()
            raise
        said, complaint = follower.communicate(timeout=30)
    if follower.returncode != 0:
        raise RuntimeError(f"the second process ended with {follower.returncode}: {complaint.strip()[-500:]}")
    times = sorted(json.loads(said)[_WARM_UP_TURNS:])
    return AgreeTimes(times[len(times) // 2] / 1e3, times[len(times) * 99 // 100] / 1e3, len(times))


def _lead(folder: Path, job: int, seconds: float) -> None:
    with open_control(Topology(0, 2, 0, 2), _identity(job), folder, _LIMITS) as plane:
        assert isinstance(plane, LeaderPlane)
        reached = plane.machine.reached
        step, until = 0, None
        while until is None or time.monotonic() < until:
            plane.exchange(step, step, time.monotonic_ns().to_bytes(8, "little"))
            while reached[1] < step + plane.horizon + 1:
                plane.poll()
            step += 1
            if step == _WARM_UP_TURNS + 1:
                until = time.monotonic() + seconds
        plane.stop()
        while not plane.stopped:
            plane.exchange(step, step)
            step += 1


def _follow(folder: Path, job: int) -> list[int]:
    """Nanoseconds of every event."""
    times = []
    with open_control(Topology(1, 2, 1, 2), _identity(job), folder, _LIMITS) as plane:
        step = 0
        while not plane.stopped:
            event = plane.exchange(step, step)
            if event:  # one monotonic clock for both processes
                times.append(time.monotonic_ns() - int.from_bytes(event, "little"))
            step += 1
    return times


def _identity(job: int) -> Identity:
    return Identity(job=job, epoch=0, world=2, horizon=1, config="doctor", model="none", code="none")


if __name__ == "__main__":
    print(json.dumps(_follow(Path(sys.argv[1]), int(sys.argv[2]))))
