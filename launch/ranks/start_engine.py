"""The one place where a command gets its engine: control plane first, then the engine over this rank's device.

Knows: which rank talks to whom, and where the sockets lie. Does not know: what an engine is made of (build.py).
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store  # the one that the process group was made with
from tqdm import tqdm

from launch.ranks.fingerprint import identity_of
from launch.ranks.flashinfer_switches import flashinfer_switches
from launch.ranks.home import settle_home
from launch.ranks.process_group import (
    abort_groups,
    address_between_nodes,
    local_device,
    rank_groups,
    write_flight_recorder,
)
from launch.ranks.rendezvous import MeetingError, Rendezvous
from launch.ranks.signals import notes_sigterm, raises_on_sigterm
from models.kernels.matmul.choice_table import machine_table
from models.kernels.traits import traits_of
from models.weights import Progress
from parallel.comm.call_log import CallLog
from parallel.comm.collectives import GroupCollectives, SingleRank
from parallel.comm.ordered_all_reduce import ordered_collectives
from parallel.comm.symmetric_all_reduce import SizeLimits, fastest_collectives
from parallel.comm.symmetric_exchange import GroupExchange, fastest_exchange
from parallel.control.connect import open_control
from parallel.control.interface import ControlPlane
from parallel.control.protocol.states import Limits
from parallel.control.transport.uds import SocketPlaceError, socket_path
from parallel.control.transport.zeromq import ListenError
from parallel.topology import ParallelDegrees
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.execute.result_reader import StepTiming
from runtime.watchdog.options import WatchdogOptions
from runtime.watchdog.watchdog import Watchdog

log = logging.getLogger(__name__)

_WAIT_BETWEEN_NODES = 3.0  # longer than a broken connection between nodes may take to come back (zeromq.py)
LOAD_SECONDS = 1800.0  # patience with a rank that loads, compiles and captures


def open_engine(
    config: EngineConfig, rendezvous: Rendezvous, on_timing: Callable[[StepTiming], None] | None = None
) -> Engine:
    """This rank's engine; every rank calls this at the same point, with the same ``config``.

    ``on_timing`` gets each step's device times, from the landing thread.
    """
    settle_home()
    device = local_device(rendezvous, config.device)
    leads = rendezvous.topology.is_leader
    limits = Limits(deadline=config.control_timeout_s)
    control = _control(config, rendezvous, limits)
    watchdog = _watchdog(config, rendezvous, control) if rendezvous.topology.world > 1 else None
    try:
        with _loading(watchdog):
            fabric = _fabric(config, rendezvous, device, watchdog)
            return build_engine(
                config,
                control=control,
                collectives=fabric.collectives,
                exchange=fabric.exchange,
                agree_min=fabric.everybody.all_reduce_min,
                share=fabric.everybody.broadcast_text,
                kernel_cache=Path(config.kernel_cache).expanduser(),
                local_rank=rendezvous.topology.local_rank,
                local_world=rendezvous.topology.local_world,
                flashinfer=flashinfer_switches(os.environ),
                device=str(device),
                progress=_bar("weights", "tensors") if leads else None,
                compiling=_bar("kernels", "kernels", delay=1.0) if leads else None,
                on_timing=on_timing,
                watchdog=watchdog,
            )
    except BaseException as error:
        if watchdog is not None:
            if isinstance(error, Exception):
                log.error("rank %d cannot start", control.rank, exc_info=error)
            watchdog.fail(error)
        control.abort(f"{type(error).__name__}: {error}")
        control.close()
        raise


def _control(config: EngineConfig, rendezvous: Rendezvous, limits: Limits) -> ControlPlane:
    """Unix sockets on one node; between nodes also ZeroMQ, at rank 0's address, with keys from the job's own store."""
    topology, identity, groups = rendezvous.topology, identity_of(config, rendezvous), config.data_parallel
    try:
        if topology.nodes == 1:
            return open_control(topology, identity, control_directory(), limits, groups=groups)
        address = address_between_nodes(rendezvous) if topology.is_leader else ""
        return open_control(topology, identity, control_directory(), limits, _get_default_store(), address, groups)
    except SocketPlaceError as error:
        raise MeetingError(f"{error} (XDG_RUNTIME_DIR and TMPDIR say where ranks of a node meet)") from error
    except ListenError as error:
        raise MeetingError(str(error)) from error


def _watchdog(config: EngineConfig, rendezvous: Rendezvous, control: ControlPlane) -> Watchdog:
    """Started before anything slow, so that a rank that dies or hangs while loading is named too."""
    job = re.sub(r"[^\w.-]", "_", f"{rendezvous.job}.{rendezvous.epoch}")
    parent = Path(config.bundles)  # jobs may share a working directory
    options = WatchdogOptions(parent / job, parent, whole_process=True, limit=config.control_timeout_s)
    if rendezvous.topology.nodes > 1:
        options = replace(options, explanation_wait=_WAIT_BETWEEN_NODES)
    watchdog = Watchdog(control, options)
    watchdog.evidence.hooks["flight recorder"] = write_flight_recorder
    watchdog.release = abort_groups
    with notes_sigterm() as signals:  # a launcher that ends all ranks, because one failed that was quicker than this
        watchdog.start()
    if signals:
        watchdog.fail(SystemExit(128 + signals[0]))
    return watchdog


@contextmanager
def _loading(watchdog: Watchdog | None) -> Iterator[None]:
    if watchdog is None:
        yield
        return
    with watchdog.phase("load", LOAD_SECONDS), raises_on_sigterm():
        yield
    watchdog.announce_limit()


def _bar(what: str, unit: str, delay: float = 0.0) -> Progress:
    """A progress bar on a terminal, from ``delay`` seconds on; what begins after its end has another."""
    bar: tqdm[Any] | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            watched = sys.stderr.isatty()
            bar = tqdm(desc=what, unit=f" {unit}", total=total, leave=False, delay=delay, disable=not watched)
        bar.update(done - bar.n)
        if done == total:
            bar.close()
            bar = None

    return show


def control_directory() -> Path:
    """This user's own directory for control sockets on this node, the same for all its ranks.

    In the first of XDG_RUNTIME_DIR, TMPDIR and /tmp that this user may write to and that leaves room for a socket's
    name. A batch job inherits XDG_RUNTIME_DIR from the login node, and it is not there on the compute node; a shell
    of su or sudo inherits another user's.
    """
    name = f"lockstride-{os.geteuid()}"
    bases = filter(None, (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()))
    return next((Path(base) / name for base in bases if _may_hold_sockets(Path(base) / name)), Path("/tmp") / name)


def _may_hold_sockets(directory: Path) -> bool:
    try:
        socket_path(directory, (1 << 63) - 1, 999, "node999")
    except SocketPlaceError:
        return False
    return os.path.isdir(directory.parent) and os.access(directory.parent, os.W_OK | os.X_OK)


@dataclass(frozen=True, slots=True)
class _Fabric:
    """What carries tensors between ranks: inside a tensor-parallel group, and between groups where there are several.

    ``everybody``: all ranks, who agree on a few things at the start.
    """

    collectives: SingleRank | GroupCollectives
    exchange: GroupExchange | None
    everybody: SingleRank | GroupCollectives


def _fabric(config: EngineConfig, rendezvous: Rendezvous, device: torch.device, watchdog: Watchdog | None) -> _Fabric:
    topology = rendezvous.topology
    if topology.world == 1:
        return _Fabric(SingleRank(), None, SingleRank())
    sharing = ParallelDegrees(topology.world, config.tensor_parallel, topology.world if config.data_parallel > 1 else 1)
    groups = rank_groups(sharing, topology.rank, config.device)
    everybody = GroupCollectives(groups.world)
    collectives: SingleRank | GroupCollectives = SingleRank()
    if groups.tensor is not None:
        limits = measured_limits(config, device, everybody) if _shares_memory(config, device) else None
        collectives = _collectives(groups.tensor, config, device, limits)
    # One log of both: the ranks of a tensor-parallel group make all their calls in one order. Exchanges alone cannot be
    # compared between groups: what a graph calls is not logged when it is replayed, and one group may launch a step
    # kernel by kernel that another one replays.
    log_of = collectives.calls if isinstance(collectives, GroupCollectives) else None
    exchange = None if groups.data is None else _exchange(groups.data, config, device, log_of)
    calls = log_of or everybody.calls
    if watchdog is not None:
        watchdog.evidence.calls = calls.snapshot
    return _Fabric(collectives, exchange, everybody)


def measured_limits(
    config: EngineConfig, device: torch.device, everybody: SingleRank | GroupCollectives
) -> SizeLimits | None:
    """Up to which sizes our kernels do all-reduces, as measured on GPUs like rank 0's; None without measurements.

    Every rank calls this, and gets what rank 0 knows: two ranks with different limits would wait for each other.
    """

    def make() -> str:
        table = machine_table(Path(config.kernel_cache).expanduser(), traits_of(device))
        limits = table.all_reduce.get(config.tensor_parallel)
        return "" if limits is None else f"{limits.one_shot},{limits.two_shot}"

    told = everybody.broadcast_text(make)
    return SizeLimits(*map(int, told.split(","))) if told else None


def _collectives(
    group: dist.ProcessGroup, config: EngineConfig, device: torch.device, limits: SizeLimits | None
) -> GroupCollectives:
    """Of a tensor-parallel group; its ranks call this together."""
    if config.deterministic:
        return ordered_collectives(group, device, symmetric=_shares_memory(config, device))
    return fastest_collectives(group, device, limits) if _shares_memory(config, device) else GroupCollectives(group)


def _exchange(
    group: dist.ProcessGroup, config: EngineConfig, device: torch.device, calls: CallLog | None
) -> GroupExchange:
    """With the other tensor-parallel groups; the ranks of ``group`` call this together."""
    return fastest_exchange(group, device, calls) if _shares_memory(config, device) else GroupExchange(group, calls)


def _shares_memory(config: EngineConfig, device: torch.device) -> bool:
    """Whether ranks try to."""
    return config.symmetric_all_reduce and device.type != "cpu"
