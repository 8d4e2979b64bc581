"""A module as a rank that shares its GPU with other ranks: what several ranks compute, where there are fewer GPUs.

    python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.shared_gpu launch generate --model M

Knows: which checks keep ranks apart (the launcher's, symmetric memory's, NCCL's), and how each is told otherwise. NCCL
refuses two ranks on a GPU of one host, so each rank names a host of its own, and what NCCL sends goes through sockets.
Does not know: what the module does. For right answers only: ranks take turns of about 2 ms on the GPU, and one that
waits for another spins to the end of its own, so times mean nothing.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

from launch.ranks import process_group, start_engine
from parallel.comm import symmetric_memory

SHARING = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def share() -> None:
    """From here on this process is a rank that may share its GPU. Before it joins the others."""
    os.environ |= SHARING | {"NCCL_HOSTID": f"rank-{os.environ['RANK']}"}
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    for module in (process_group, start_engine):
        module.local_device = lambda rendezvous, device: place  # type: ignore[attr-defined]
    symmetric_memory._why_not = lambda group, device: None


if __name__ == "__main__":
    share()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
