"""Who started this process, which rank it is, and where all ranks meet.

Knows: the environments of torchrun and of Slurm. Does not know: torch (process_group.py brings the ranks together), or
the control plane's sockets (parallel/control).

A world of the wrong size is refused here, because it otherwise shows only as a hang or as every node working alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from parallel.topology import Topology
from runtime.number_text import is_whole_number

_PIECE = re.compile(r"([^,\[\]]+)|\[([^\]]*)\]")


def first_host(node_list: str) -> str:
    """The first name of the list."""
    return next(hosts(node_list))


def hosts(node_list: str) -> Iterator[str]:
    """``gpu[01-02,7],login`` to gpu01, gpu02, gpu7, login. Raises ValueError for anything else."""
    names = _split(node_list)
    if not all(names):
        raise ValueError(f"the node list {node_list!r} has an empty name")
    for name in names:
        yield from _expand_name(name, node_list)


def _split(node_list: str) -> list[str]:
    """At the commas outside of brackets."""
    names, depth = [""], 0
    for character in node_list.strip():
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"the node list {node_list!r} has brackets that do not match")
        if character == "," and depth == 0:
            names.append("")
        else:
            names[-1] += character
    if depth:
        raise ValueError(f"the node list {node_list!r} has brackets that do not match")
    return names


def _expand_name(name: str, node_list: str) -> Iterator[str]:
    """Every combination of a name's brackets, the last one fastest."""
    found = _PIECE.search(name)
    pieces = [match.group(0) for match in _PIECE.finditer(name)]
    if found is None or "".join(pieces) != name:
        raise ValueError(f"the node list {node_list!r} cannot be read at {name!r}")
    head, rest = pieces[0], name[len(pieces[0]) :]
    choices = _numbers(head[1:-1], node_list) if head.startswith("[") else iter([head])
    for choice in choices:
        if rest:
            yield from (choice + tail for tail in _expand_name(rest, node_list))
        else:
            yield choice


def _numbers(ranges: str, node_list: str) -> Iterator[str]:
    """``01-03,7`` to 01, 02, 03, 7: as many digits as the first number has."""
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        high = high or low
        if not (is_whole_number(low) and is_whole_number(high) and int(low) <= int(high)):
            raise ValueError(f"the node list {node_list!r} has {part!r} in brackets, which is no range of numbers")
        yield from (f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))


_PORTS = range(20_000, 30_000)  # where Slurm jobs without MASTER_PORT meet; below Linux' ephemeral ports


class RendezvousError(RuntimeError):
    """The ranks cannot be brought together as started; the text names the numbers and what to type."""


class MeetingError(RendezvousError):
    """A rank did not come, at the start or at the end."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet. ``job`` is the same text on all ranks of one start; ``epoch`` counts its restarts."""

    topology: Topology
    launcher: Literal["torchrun", "slurm", "plain"]
    master_address: str = "127.0.0.1"
    master_port: int = 0
    job: str = "local"
    epoch: int = 0

    @property
    def job_number(self) -> int:
        """``job`` as a 63-bit number, for headers that have no room for texts."""
        return int.from_bytes(blake2b(self.job.encode(), digest_size=8).digest(), "little") >> 1


def discover(environ: Mapping[str, str]) -> Rendezvous:
    """Read the launcher's environment: torchrun's (or one made alike), else srun's, else this process is alone.

    Raises RendezvousError when variables are missing, malformed, or disagree about the size of the world.
    """
    if "WORLD_SIZE" in environ or "RANK" in environ:
        return _from_torchrun(environ)
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:  # a batch script has the first, but is no task
        return _from_slurm(environ)
    return Rendezvous(Topology(), "plain", job=f"local-{os.getpid()}")


def check_degrees(tensor: int | None, data: int | None, rendezvous: Rendezvous) -> int:
    """The tensor-parallel degree: what was asked for, or all ranks divided by the data-parallel degree.

    None is what was not asked for; the data-parallel degree is 1 then. Raises RendezvousError, naming all numbers,
    where tensor times data is not the number of ranks that were started.
    """
    world, groups = rendezvous.topology.world, 1 if data is None else data
    if groups <= 1:  # less is refused by EngineConfig
        if tensor not in (None, world):
            raise RendezvousError(
                f"--tensor-parallel-size is {tensor}, but {world} rank(s) were started: pass --tensor-parallel-size "
                f"{world}, or start {tensor} {_how_to_start(tensor)}"
            )
        return world
    if tensor is None and world % groups:
        legal = [n for n in range(1, world + 1) if world % n == 0]
        raise RendezvousError(
            f"--data-parallel-size is {groups}, which does not divide the {world} rank(s) that were started: choose "
            f"from {legal}, or start {groups} or a multiple of it {_how_to_start(groups)}"
        )
    if tensor is not None and tensor * groups != world:
        product = tensor * groups
        fits = f"pass --tensor-parallel-size {world // groups}, or " if world % groups == 0 else ""
        raise RendezvousError(
            f"--tensor-parallel-size {tensor} x --data-parallel-size {groups} is {product} ranks, but {world} were "
            f"started: {fits}start {product} {_how_to_start(product)}"
        )
    return world // groups


def _how_to_start(ranks: int | None) -> str:
    return f"(torchrun --nproc-per-node {ranks}, or srun --ntasks {ranks})"


def _from_torchrun(environ: Mapping[str, str]) -> Rendezvous:
    world = _number(environ, "WORLD_SIZE")
    local_world = _number(environ, "LOCAL_WORLD_SIZE", default=world)
    if local_world < 1 or world % local_world:
        raise RendezvousError(f"WORLD_SIZE is {world}, which is not a multiple of LOCAL_WORLD_SIZE {local_world}")
    nodes = world // local_world
    _check_slurm_step(environ, world, agents=_number(environ, "GROUP_WORLD_SIZE", default=nodes))
    rank = _number(environ, "RANK")
    topology = _topology(
        rank=rank,
        world=world,
        local_rank=_number(environ, "LOCAL_RANK", default=rank % local_world),
        local_world=local_world,
        node_rank=_number(environ, "GROUP_RANK", default=rank // local_world),
        nodes=nodes,
    )
    if world == 1:
        return Rendezvous(topology, "torchrun", job=f"local-{os.getpid()}")
    address, port = environ.get("MASTER_ADDR"), _port(environ)
    if not address:
        raise RendezvousError(f"WORLD_SIZE is {world}, but MASTER_ADDR is not set: start with torchrun, or set it")
    job = f"{environ.get('TORCHELASTIC_RUN_ID', environ.get('SLURM_JOB_ID', 'none'))}-{address}-{port}"
    epoch = _number(environ, "TORCHELASTIC_RESTART_COUNT", default=0)
    return Rendezvous(topology, "torchrun", address, port, job, epoch)


def _check_slurm_step(environ: Mapping[str, str], world: int, agents: int) -> None:
    """Under srun, one task a node runs torchrun, or one task a rank has its variables set by a script."""
    if "SLURM_STEP_ID" not in environ:
        return
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", default=_number(environ, "SLURM_NTASKS", default=1))
    if "TORCHELASTIC_RUN_ID" in environ:
        if tasks != agents:
            raise RendezvousError(
                f"srun started {tasks} task(s), but torchrun brought {agents} together (WORLD_SIZE {world}): give "
                f"every task the same --master-addr, and --nnodes {tasks} --node-rank $SLURM_NODEID"
            )
    elif tasks != world:
        raise RendezvousError(
            f"SLURM_STEP_NUM_TASKS is {tasks}, but WORLD_SIZE is {world}: start {world} tasks (srun --ntasks {world}), "
            "or unset WORLD_SIZE and RANK to take Slurm's"
        )


def _from_slurm(environ: Mapping[str, str]) -> Rendezvous:
    rank = _number(environ, "SLURM_PROCID")
    step_tasks = _number(environ, "SLURM_STEP_NUM_TASKS", default=_number(environ, "SLURM_NTASKS", default=1))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", default=_number(environ, "SLURM_NNODES", default=1))
    if nodes < 1 or step_tasks % nodes:
        raise RendezvousError(
            f"srun started {step_tasks} task(s) on {nodes} node(s), but every node must have the same number: pass "
            f"--ntasks-per-node {max(1, step_tasks // max(1, nodes))}"
        )
    topology = _topology(
        rank=rank,
        world=step_tasks,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world=step_tasks // nodes,
        node_rank=_number(environ, "SLURM_NODEID"),
        nodes=nodes,
    )
    job_id, step_id = environ.get("SLURM_JOB_ID", "0"), environ["SLURM_STEP_ID"]
    epoch = _number(environ, "SLURM_RESTART_COUNT", default=0)
    port = _PORTS[_stable_number(job_id, step_id) % len(_PORTS)]
    address = environ.get("MASTER_ADDR") or _first_host(environ, nodes)
    port = _port(environ, default=port)
    return Rendezvous(topology, "slurm", address, port, f"{job_id}-{step_id}", epoch)


def _first_host(environ: Mapping[str, str], nodes: int) -> str:
    """The host of rank 0: the first of the step's nodes. There is no falling back to localhost on several nodes."""
    if nodes == 1:
        return "127.0.0.1"
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not node_list:
        raise RendezvousError(
            f"the job has {nodes} nodes, but SLURM_STEP_NODELIST is not set: set MASTER_ADDR to the first"
        )
    try:
        return first_host(node_list)
    except ValueError as error:
        raise RendezvousError(f"{error}: set MASTER_ADDR to the first node") from error


def _topology(**numbers: int) -> Topology:
    try:
        return Topology(**numbers)
    except ValueError as error:
        raise RendezvousError(f"the launcher's environment does not add up: {error}") from error


def _stable_number(job_id: str, step_id: str) -> int:
    digits = "".join(filter(is_whole_number, job_id)) or "0"
    return int(digits) * 7 + (int(step_id) if is_whole_number(step_id) else 0)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None or text == "":
        if default is None:
            raise RendezvousError(f"{name} is not set, though the launcher sets its like: start with torchrun or srun")
        return default
    if not is_whole_number(text):
        raise RendezvousError(f"{name} is {text!r}, but must be a whole number")
    return int(text)


def _port(environ: Mapping[str, str], default: int | None = None) -> int:
    port = _number(environ, "MASTER_PORT", default)
    if not 1 <= port <= 65535:
        raise RendezvousError(f"MASTER_PORT is {port}, but must be 1 to 65535: set a free port of rank 0's node")
    return port
