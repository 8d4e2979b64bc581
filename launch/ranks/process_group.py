"""The process groups of all ranks and of some of them, from start to end.

Knows: torch.distributed's start and end, which GPU is whose, what a flight recorder leaves when a job fails, how groups
are aborted. Does not know: how ranks were found (rendezvous.py), which
ranks belong together (parallel/topology.py), what they do together.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from launch.ranks.rendezvous import MeetingError, Rendezvous, RendezvousError
from parallel.topology import ParallelDegrees, Topology

RECORDED_CALLS = 2000  # of each rank: some 30 steps of a large model; a captured graph records its own only once
TRACE = "flight-recorder.json"


def record_collectives(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before the process group is made: keep a ring of the last calls, unless ``environ`` says otherwise."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:  # the older name of the same, of which torch complains
        environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_CALLS))


def write_flight_recorder(folder: Path) -> None:
    """Write the recorder's calls to ``folder``/flight-recorder.json: sequence numbers, shapes, states, times in ns.

    Nothing where torch has no recorder, or no group. JSON; never its pickled form. NCCL's calls are recorded apart, and
    a torch that could use NCCL has both recorders also where gloo carries everything.
    """
    if not dist.is_initialized():
        return
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json" if _uses_nccl() else "_dump_fr_trace_json", None)
    if dump is not None:
        (folder / TRACE).write_bytes(dump())


def abort_groups(wait_s: float = 1.0) -> bool:
    """End every communicator from this side, so that no kernel of ours waits for a peer. Whether that came to an end.

    An abort may hang as the call that it ends did: it runs in another thread, which is given up after ``wait_s``.
    Only NCCL can be aborted; with gloo alone there is nothing to do, since its calls end with their process.
    """
    if not dist.is_initialized() or not _uses_nccl():
        return True
    aborter = threading.Thread(target=distributed_c10d._abort_process_group, name="abort-groups", daemon=True)
    aborter.start()
    aborter.join(wait_s)
    return not aborter.is_alive()


def _uses_nccl() -> bool:
    return dist.is_nccl_available() and "nccl" in dist.get_backend_config()


GROUP_TIMEOUT_S = 300.0  # for all ranks to come to a point where they meet
# Of a collective: more than any patience of the watchdog, which knows a rank that loads from one that hangs.
COLLECTIVE_TIMEOUT_S = 2400.0


def local_device(rendezvous: Rendezvous, device: str) -> torch.device:
    """This rank's device. Raises RendezvousError when a node has fewer GPUs than ranks."""
    if device == "cpu":
        return torch.device("cpu")
    visible, local_rank = torch.cuda.device_count(), rendezvous.topology.local_rank
    if rendezvous.launcher == "slurm" and visible == 1:
        return torch.device("cuda", 0)  # Slurm may show each task its own GPU only
    if local_rank >= visible:
        raise RendezvousError(
            f"local rank {local_rank} needs GPU {local_rank}, but {visible} are visible (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): start at most {visible} ranks a node, or pass "
            "--device cpu"
        )
    return torch.device("cuda", local_rank)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """This rank's process groups. ``tensor``: the ranks that split layers with it, None where it is alone. ``data``:
    those that hold the same shard in the other tensor-parallel groups, None where there are no others."""

    world: dist.ProcessGroup
    tensor: dist.ProcessGroup | None
    data: dist.ProcessGroup | None


def rank_groups(sharing: ParallelDegrees, rank: int, device: str) -> RankGroups:
    """Called inside ``joined``, by all ranks: each group is made by everybody, member or not, in one order."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("rank_groups is called inside joined(): there is no process group yet")
    if sharing.data == 1:
        return RankGroups(world, world, None)
    if sharing.tensor == 1:
        return RankGroups(world, None, world)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group_of in (sharing.tensor_group, sharing.data_group):
        for members in dict.fromkeys(map(group_of, range(sharing.world))):
            made[members] = dist.new_group(
                list(members), timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), backend=_backend(device)
            )
    return RankGroups(world, made[sharing.tensor_group(rank)], made[sharing.data_group(rank)])


def _backend(device: str) -> str:
    """Besides a GPU's collectives there are small ones of numbers that the host has."""
    return "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"


_joins: Counter[tuple[str, int, int]] = Counter()  # by start, port and rank: every rank joins as often as the others


@contextmanager
def joined(rendezvous: Rendezvous, device: str, timeout_s: float = GROUP_TIMEOUT_S) -> Iterator[torch.device]:
    """All ranks together, from here to the end of the block; yields this rank's device. One rank alone needs no group.

    By its end the block has let go of everything that holds the group, captured graphs first. After a normal end all
    ranks wait for each other, and the one that keeps the store leaves last; after an error no rank is waited for.
    Raises MeetingError when a rank is missing at either end, RendezvousError when there are too few GPUs.
    """
    place, topology = local_device(rendezvous, device), rendezvous.topology
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if topology.world == 1:
        yield place
        return
    _set_fabric_defaults(topology)
    record_collectives()
    timeout = timedelta(seconds=timeout_s)
    store = _meet(rendezvous, timeout)
    dist.init_process_group(
        backend=_backend(place.type),
        store=PrefixStore("group", store),
        rank=topology.rank,
        world_size=topology.world,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=place if place.type == "cuda" else None,
    )
    yield place
    _all_come_to("done", store, topology, timeout)
    dist.destroy_process_group()
    if topology.is_leader:
        _all_come_to("left", store, topology, timeout)
    else:
        store.set(f"left/{topology.rank}", "")


def address_between_nodes(rendezvous: Rendezvous) -> str:
    """The address at which the other nodes reach rank 0, as rank 0 sees it. Raises MeetingError where it has none."""
    name = rendezvous.master_address
    address = _resolve(name)
    if address != name and (address.startswith("127.") or address == "::1"):
        raise MeetingError(
            f"the name of rank 0's node, {name}, is {address} to itself, where other nodes cannot reach it: set "
            "MASTER_ADDR to its address on the network (LOCKSTRIDE_INTERFACE in slurm/site.env does that)"
        )
    return address


def _resolve(name: str) -> str:
    """IPv4 where there is one. An unknown name is refused at once: torch would try it until the time-out."""
    try:
        found = [(family, str(at[0])) for family, *_, at in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise MeetingError(
            f"rank 0's node is {name}, which has no address on {socket.gethostname()} ({error}): set MASTER_ADDR to "
            "one that every node reaches"
        ) from error
    return next((address for family, address in found if family == socket.AF_INET), found[0][1])


def _meet(rendezvous: Rendezvous, timeout: timedelta) -> Store:
    """The store of this start, where all ranks have come. torchrun's agent keeps it, or without an agent rank 0."""
    topology = rendezvous.topology
    agent_keeps = rendezvous.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = topology.is_leader and not agent_keeps
    name = rendezvous.master_address
    if topology.nodes == 1 and not agent_keeps:
        name = "127.0.0.1"  # whatever the node is called: nothing beyond it needs to reach the store
    address = _resolve(name)
    listener = None
    if keeps:  # on one address only: nothing beyond the network between nodes needs to reach it
        address = address if topology.nodes == 1 else address_between_nodes(rendezvous)
        listener = _listener(address, rendezvous.master_port)
    try:
        server = TCPStore(
            address,
            rendezvous.master_port,
            is_master=keeps,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (DistError, RuntimeError) as error:
        raise MeetingError(
            f"rank {topology.rank} cannot meet the others at {name}:{rendezvous.master_port} "
            f"({str(error).splitlines()[0]}): look at the other ranks' logs first, then at MASTER_ADDR and MASTER_PORT"
        ) from error
    # torchrun's store outlives a group, and what the last one wrote there must not be read for the next one's.
    start = f"{rendezvous.job}/{rendezvous.epoch}"
    here = start, rendezvous.master_port, topology.rank
    store = PrefixStore(f"lockstride/{start}/{_joins[here]}", server)
    _joins[here] += 1
    _check_world(store, topology)
    _all_come_to("met", store, topology, timeout)
    return store


def _listener(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise MeetingError(
                f"rank 0 runs on {socket.gethostname()}, which does not have the address {address}: set MASTER_ADDR to "
                "an address of that node"
            ) from error
        raise MeetingError(f"port {port} cannot be listened on ({error.strerror}): set MASTER_PORT") from error
    listener.listen(1024)
    return listener


def _check_world(store: Store, topology: Topology) -> None:
    """Ranks of differently large worlds would wait for each other until the time-out."""
    first = int(store.compare_set("world", "", str(topology.world)))
    if first != topology.world:
        raise MeetingError(
            f"rank {topology.rank} was started for {topology.world} ranks, but another rank for {first}: start all of "
            "them with one command"
        )


def _all_come_to(point: str, store: Store, topology: Topology, timeout: timedelta) -> None:
    """A barrier that can name who is missing: MeetingError with the ranks that did not come in time."""
    store.set(f"{point}/{topology.rank}", "")
    keys = [f"{point}/{rank}" for rank in range(topology.world)]
    try:
        store.wait(keys, timeout)
    except (DistError, RuntimeError) as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise MeetingError(
            f"rank(s) {missing} of {topology.world} did not come to {point!r} within {timeout.total_seconds():g} s: "
            "look at their logs"
        ) from error


def _set_fabric_defaults(topology: Topology) -> None:
    """Multicast over NVLink stays off, since it can put a shared host out of service; one node talks over loopback."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if topology.nodes == 1 and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
