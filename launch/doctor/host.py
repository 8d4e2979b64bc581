"""The machine around the GPUs: processors, limits, shared memory, control sockets, network, launcher.

Knows: /proc, /dev/shm, resource limits, interfaces and what Slurm says. Does not know: torch, devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from launch.doctor.findings import Section
from launch.ranks.rendezvous import RendezvousError, discover
from parallel.control.connect import open_control
from parallel.control.errors import ControlError
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.handshake import Identity
from parallel.control.protocol.states import Limits
from parallel.control.transport.uds import SocketPlaceError, private_directory, socket_path
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


SHARED_MEMORY = Path("/dev/shm")
_NCCL_SHARED_BYTES = 1 << 30  # NCCL takes tens of MiB a rank; containers start with 64 MiB in all
_FILES = 4096
_SLOW_AGREE_US = 1000.0
_AGREE_SECONDS = 0.01
_SIOCGIFADDR = 0x8915
_DRAIN_SECONDS = 20  # generate's default


def host() -> Section:
    section = Section("Machine")
    cores = len(os.sched_getaffinity(0))
    section.facts["host"] = socket.gethostname()
    section.facts["cores"] = cores
    section.facts["cores_of_machine"] = os.cpu_count()
    section.facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    section.facts["open_files"] = files
    section.facts["locked_memory"] = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    if cores * 4 <= (os.cpu_count() or 1):
        section.note(
            f"this process may use {cores} of {os.cpu_count()} cores",
            "each rank wants two or more: sbatch --exclusive, or srun --cpus-per-task",
        )
    if files < _FILES:
        section.warn(f"at most {files} files may be open", f"ulimit -n {_FILES}")
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        section.warn(
            f"memory that may be locked is limited to {locked >> 10} KiB, and there is InfiniBand, which locks its own",
            "ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf)",
        )
    _shared_memory(section, SHARED_MEMORY)
    return section


def control(directory: Path) -> Section:
    """Whether ranks of this machine can talk to each other, and how long they need to agree."""
    section = Section("Control plane")
    section.facts["directory"] = str(directory)
    try:
        private_directory(directory)
        socket_path(directory, (1 << 63) - 1, 999, "node999")
        times = measure_agreement(directory, _AGREE_SECONDS)
    except (OSError, SocketPlaceError, ControlError, RuntimeError) as error:
        section.error(
            f"two processes cannot meet at a Unix socket in {directory}: {error}",
            "set XDG_RUNTIME_DIR (or TMPDIR) to a short path on a local disk that is yours alone",
        )
        return section
    _judge_agreement(section, times)
    return section


def network(environ: Mapping[str, str]) -> Section:
    """Where ranks would meet: loopback on one node, an interface between several."""
    section = Section("Network")
    addresses = interface_addresses()
    section.facts["interfaces"] = addresses
    if not any(address.startswith("127.") for address in addresses.values()):
        section.error("no interface has an address of 127.0.0.0/8: ranks of one node meet there", "ip link set lo up")
    name = socket.gethostname()
    try:
        own = socket.gethostbyname(name)
    except OSError as error:
        own = ""
        section.note(f"the name of this host, {name}, has no address ({error})", _SET_INTERFACE)
    section.facts["own_address"] = own or None
    chosen = environ.get("LOCKSTRIDE_INTERFACE") or environ.get("NCCL_SOCKET_IFNAME", "").lstrip("=")
    section.facts["between_nodes"] = chosen or "by name"
    if chosen and not any(found.startswith(chosen) for found in addresses):
        section.warn(f"the interface {chosen} was chosen, but has no IPv4 address here", _SET_INTERFACE)
    elif not chosen and own.startswith("127."):
        section.note(
            f"{name} is {own} to itself: on one node that is fine, between nodes others could not reach it",
            _SET_INTERFACE,
        )
    return section


_SET_INTERFACE = "for several nodes, set LOCKSTRIDE_INTERFACE in slurm/site.env"


def launcher(environ: Mapping[str, str]) -> Section:
    """Who started this process, and what Slurm would do to a job."""
    section = Section("Launcher")
    try:
        found = discover(environ)
    except RendezvousError as error:
        section.error(f"ranks started like this process would be refused: {error}", "see docs/slurm.md")
        return section
    section.facts["launcher"] = found.launcher
    section.facts["ranks"] = found.topology.world
    section.facts["nodes"] = found.topology.nodes
    section.facts["slurm_commands"] = [name for name in ("sbatch", "srun", "scontrol", "scancel") if shutil.which(name)]
    if "SLURM_JOB_ID" in environ and "scontrol" not in section.facts["slurm_commands"]:
        section.note(
            "there is no scontrol here: jobs cannot requeue themselves before their time limit",
            "mount Slurm's commands into the container, or submit again",
        )
    waits = kill_wait()
    section.facts["kill_wait_s"] = waits
    if waits is not None and waits < _DRAIN_SECONDS + 5:
        section.note(
            f"Slurm kills {waits} s after SIGTERM, and generate takes up to {_DRAIN_SECONDS} s to end by itself",
            f"--drain-seconds {max(1, waits * 2 // 3)} (slurm/generate.sbatch does that by itself)",
        )
    return section


def interface_addresses() -> dict[str, str]:
    """IPv4 addresses of the interfaces that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", os.fsencode(name)[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    return found


def kill_wait() -> int | None:
    """Seconds between Slurm's SIGTERM and its SIGKILL; None where no Slurm answers."""
    if shutil.which("scontrol") is None:
        return None
    try:
        shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    for line in shown.stdout.splitlines():
        if line.startswith("KillWait"):
            return int(line.partition("=")[2].split()[0])
    return None


def _shared_memory(section: Section, place: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
                memory[0] = 1
        free = shutil.disk_usage(place).free
    except (OSError, ValueError) as error:
        section.warn(
            f"shared memory at {place} cannot be used ({error}): NCCL and gloo need it between ranks of a node",
            "in a container: --ipc=host, or --shm-size=8g",
        )
        return
    section.facts["shared_memory_free_gib"] = round(free / 2**30, 2)
    if free < _NCCL_SHARED_BYTES:
        section.warn(
            f"{place} has {free >> 20} MiB left, which may be too little for NCCL between ranks of a node",
            "in a container: --ipc=host, or --shm-size=8g; else remove what old jobs left there",
        )


def _judge_agreement(section: Section, times: AgreeTimes) -> None:
    section.facts["agree_p50_us"] = round(times.p50_us, 1)
    section.facts["agree_p99_us"] = round(times.p99_us, 1)
    section.facts["agree_turns"] = times.turns
    text = f"two processes agree in {times.p50_us:.0f} us (p50; p99 {times.p99_us:.0f} us, {times.turns} turns)"
    if times.p50_us > _SLOW_AGREE_US:
        section.warn(text, "the cores are taken by others: give the job cores of its own (sbatch --exclusive)")
    else:
        section.ok(text)
