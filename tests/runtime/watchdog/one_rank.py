"""One rank of a job as a process with control plane and watchdog: ``python -m tests.runtime.watchdog.one_rank``.

Takes turns until it is told to misbehave: RANK WORLD SOCKETS BUNDLES FAULT STEP. The fault is the last rank's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from parallel.control.connect import open_control
from parallel.control.errors import ControlError
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.handshake import Identity
from parallel.control.protocol.states import Limits
from parallel.topology import Topology
from runtime.schedule.digest import RollingDigest
from runtime.watchdog.crash_report import Evidence
from runtime.watchdog.options import WatchdogOptions
from runtime.watchdog.parent_death import die_with_parent
from runtime.watchdog.watchdog import Watchdog


def main(rank: int, world: int, sockets: Path, bundles: Path, fault: str, fault_step: int) -> None:
    die_with_parent()
    identity = Identity(7, 0, world, 1, "c", "m", "x")
    limits = Limits(deadline=20.0)
    plane = open_control(Topology(rank, world, rank, world), identity, sockets, limits)
    digest, records = RollingDigest(), list[dict[str, int]]()
    options = WatchdogOptions(
        bundles, bundles.parent, whole_process=True, limit=1.0, interval=0.1, silence=0.6, grace=0.5
    )
    evidence = Evidence(lambda: records, digest.recent)
    watchdog = Watchdog(plane, options, evidence, lambda: digest.value)
    watchdog.start()
    plane.explain_with(digest.recent)
    watchdog.place = "run"
    try:
        for step in range(200):
            watchdog.step = step
            if rank == world - 1 and step == fault_step:
                misbehave(fault, digest)
            if step == 150 and rank == 0:
                plane.stop()
            watchdog.place = "land"
            while isinstance(plane, LeaderPlane) and min(plane.machine.reached.values()) < step - 3:
                plane.poll()  # stands for a collective: the leader cannot run ahead of the others
                time.sleep(0.001)
            watchdog.place = "exchange"
            plane.exchange(step, digest.value)
            watchdog.place = "plan"
            digest.fold(step, "plan", (step, 3))
            records.append({"step": step})
            time.sleep(0.005)
            if plane.stopped:
                break
    except ControlError as error:
        watchdog.fail(error)
    except Exception as error:
        watchdog.fail(error)
    watchdog.stop()
    plane.close()


def misbehave(fault: str, digest: RollingDigest) -> None:
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            while True:  # woken to show where it stood: it stands there still, however late the look comes
                time.sleep(0.001)
        case "exit":
            os._exit(0)
        case "loop":
            while True:
                time.sleep(0.001)
        case "raise":
            raise MemoryError("no room")
        case "decide":
            digest.fold(999, "plan", (-1,))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
