"""Tensor-parallel ranks in one process: an engine a thread, collectives and control plane made of barriers.

Sums are taken in rank order over float64 (exact_kernels.py), so several ranks can be compared bit for bit with one:
what is left of the order of a sum is gone by the time logits are rounded to float32.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from parallel.comm.collectives import Collectives, PendingAllReduce
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.quantised import Quantised
from parallel.control.interface import SingleRankControl
from runtime.engine import Engine
from runtime.execute.device.cpu_twin import TwinDevice
from tests.plant import Op
from tests.runtime.engine.lives import check_all_is_back
from tests.runtime.engine.rig import rig

PATIENCE_S = 120.0  # a machine may be busy with other things


class Meeting:
    """Where all ranks put something down, and each picks up everybody's. Broken for good where one stays away."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=PATIENCE_S)
        self._left: list[Any] = [None] * ranks
        self.mailbox = deque[tuple[int, bytes]]()  # to rank 0

    def everyones(self, rank: int, mine: Any) -> list[Any]:
        self._left[rank] = mine
        self.barrier.wait()
        found = list(self._left)
        self.barrier.wait()
        return found


class MetCollectives(Collectives):
    """Collectives between threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.ranks
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting.everyones(self.rank, x.clone())).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.everyones(self.rank, x.clone()), -1)


class LateSums(MetCollectives):
    """Those that take a sum with the norm that follows it, as the kernel of parallel/comm/all_reduce_triton.py does.

    ``late`` counts the sums that were left to a norm.
    """

    late = 0

    def all_reduce_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | PendingAllReduce:
        type(self).late += 1
        return PendingAllReduce(x_TN, self, pushed)

    def all_reduce_norm(
        self,
        x_TN: Tensor,
        residual_TN: Tensor | None,
        norm_N: Tensor,
        eps: float,
        *,
        pushed: bool = False,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:
        total_TN = self.all_reduce(x_TN) if residual_TN is None else self.all_reduce(x_TN) + residual_TN
        scale_T1 = torch.rsqrt(total_TN.pow(2).mean(-1, keepdim=True) + eps)
        return total_TN * scale_T1 * norm_N, total_TN


class PushedSums(LateSums):
    """LateSums whose parts a product puts into other ranks' places first (symmetric_all_reduce.py).

    ``exchanges`` of the places is set while such a part waits for its sum, and nothing else may be called then. With
    kernels that set it (``pushed``).
    """

    pushed = 0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting, rank)
        waiting = torch.zeros(1, dtype=torch.int32)
        self._buffers = PeerBuffers((0,) * self.size, waiting, rank, rows=0, row_bytes=0)

    def push_buffers(self, tokens: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        return self._buffers if tokens % 2 else None  # so that both ways take turns

    def all_reduce(self, x: Tensor) -> Tensor:
        assert not self._buffers.use_counts.item(), "a part that was pushed is not summed yet"
        return super().all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        assert not self._buffers.use_counts.item(), "a part that was pushed is not summed yet"
        return super().all_gather(x)

    def all_reduce_norm(
        self,
        x_TN: Tensor,
        residual_TN: Tensor | None,
        norm_N: Tensor,
        eps: float,
        *,
        pushed: bool = False,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:
        type(self).pushed += pushed
        assert self._buffers.use_counts.item() == pushed
        self._buffers.use_counts.zero_()
        return super().all_reduce_norm(x_TN, residual_TN, norm_N, eps)


def pushed(linear_push: Op, buffers: PeerBuffers, *given: Any) -> tuple[Tensor, bool]:
    """For kernels whose every product for a sum is pushed."""
    buffers.use_counts.add_(1)
    return linear_push(buffers, *given)[0], True


class MetControl(SingleRankControl):
    """The leader's events and end for everybody; before every step all ranks have decided alike."""

    def __init__(self, meeting: Meeting, rank: int, horizon: int) -> None:
        super().__init__(horizon)
        self.rank, self.world = rank, meeting.ranks
        self._meeting = meeting

    def send_message(self, payload: bytes) -> None:
        self._meeting.mailbox.append((self.rank, payload))

    def take_messages(self) -> list[tuple[int, bytes]]:
        return [self._meeting.mailbox.popleft() for _ in range(len(self._meeting.mailbox))]

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        everyones = self._meeting.everyones(self.rank, (step, digest, payload, self._stop))
        assert len({mine[:2] for mine in everyones}) == 1, f"step {step}: the ranks decided differently"
        _, _, payload, self._stop = everyones[0]
        return super().exchange(step, digest, payload)


@contextmanager
def tensor_rig(
    ranks: int,
    *,
    horizon: int = 0,
    jitter_s: float = 0.0,
    prepare: Callable[[Engine], None] | None = None,
    collectives: type[MetCollectives] = MetCollectives,
    of_rank: Callable[[int], dict[str, Any]] = lambda rank: {},
    **limits: Any,
) -> Iterator[Engine]:
    """Rank 0's engine of ``ranks``; the others follow, each in a thread, and end with everything given back.

    ``limits`` are the rig's, the same for all, ``of_rank`` those of one; ``prepare`` is called with every engine before
    its first turn. Where a rank fails, the others fail for want of it: its own error is the one that is raised.
    """
    devices, hosts = Meeting(ranks), Meeting(ranks)

    @contextmanager
    def one(rank: int) -> Iterator[Engine]:
        mine: dict[str, Any] = {"device": TwinDevice(jitter_s=jitter_s, seed=rank), **of_rank(rank)}
        if ranks > 1:
            mine["collectives"] = collectives(devices, rank)
        try:
            if ranks > 1:
                mine["control"] = MetControl(hosts, rank, horizon)
            with rig(horizon=horizon, **(limits | mine)) as engine:
                if prepare is not None:
                    prepare(engine)
                yield engine
        except BaseException:
            devices.barrier.abort()  # nobody shall wait for this rank
            hosts.barrier.abort()
            raise

    def follow(rank: int) -> None:
        with one(rank) as engine:
            engine.follow()
            check_all_is_back(engine)

    with ThreadPoolExecutor(ranks) as threads:
        others = [threads.submit(follow, rank) for rank in range(1, ranks)]
        try:
            with one(0) as engine:
                yield engine
            for other in others:
                other.result()
        except Exception as mine:
            if not _missed(mine):
                raise
            for rank, other in enumerate(others, 1):
                if (error := other.exception()) is not None and not _missed(error):
                    raise AssertionError(f"rank {rank} failed: {error!r}") from error
            raise AssertionError(f"some rank stayed away from a meeting for {PATIENCE_S:.0f} s") from mine


def _missed(error: BaseException) -> bool:
    """Whether all that is wrong is that another rank did not come."""
    if isinstance(error, threading.BrokenBarrierError):
        return True
    return "BrokenBarrierError" in str(error) or (error.__cause__ is not None and _missed(error.__cause__))
