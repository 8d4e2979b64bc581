"""What a sum over the GPUs of a node costs, by message: the kernel of parallel/, torch's one-shot kernel, NCCL.

Run: python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.all_reduce --out FOLDER

Every figure is the median over replays of a graph of calls that follow each other, each with a norm's launch between
them but for the last columns, where the norm is part of the call. Those have to give the same bits before they are
timed. ``--width``: numbers of a row, in bfloat16 [4096].
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.kernels.matmul import norm as norm_kernels
from models.kernels.matmul.autotune import median_graph_us
from parallel.comm.collectives import GroupCollectives
from parallel.comm.symmetric_all_reduce import AllReduceKernel, SymmetricCollectives

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CALLS = 32
EPS = 1e-6


def chain(calls: Callable[[Tensor], Tensor], x: Tensor, norm: Tensor | None) -> Callable[[], None]:
    def run() -> None:
        y = x
        for _ in range(CALLS):
            y = calls(y)
            if norm is not None:
                y = norm_kernels.rms_norm(y, None, norm, 1e-6, pdl=True)

    return run


def normed_by(way: AllReduceKernel, norm: Tensor, y: Tensor) -> Tensor:
    return way(y, norm_N=norm, eps=EPS)[0]


def objection(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> str | None:
    """What differs: sums by a bit, norms by more than another order of adding squares gives."""
    if not torch.equal(found[1], expected[1]):
        return "the sum"
    off = float((found[0].float() - expected[0].float()).norm() / expected[0].float().norm())
    return None if off < 1e-3 else f"the norm, by {off:.1e},"


def ranks_of_torchrun() -> tuple[dist.ProcessGroup, torch.device]:
    """All ranks that torchrun started, and this one's GPU."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    assert dist.group.WORLD is not None
    return dist.group.WORLD, device


def show(row: dict[str, Any]) -> None:
    """On rank 0, as one line."""
    if dist.get_rank() == 0:
        print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def leave(found: list[dict[str, Any]], file: Path) -> None:
    """Rank 0 writes what was found. Nothing runs after this."""
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1))
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # destroying a group whose calls were captured may not return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for all-reduce.json")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    options = parser.parse_args()
    out: Path = options.out
    group, device = ranks_of_torchrun()
    from torch.distributed import _symmetric_memory as symmetric_memory

    made, nccl = SymmetricCollectives(group, device), GroupCollectives(group)  # kept: sums go through its memory
    own = made.dispatch
    part: Any = symmetric_memory.empty(max(options.rows) * options.width, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(part, group)
    norm = torch.ones(options.width, dtype=torch.bfloat16, device=device)
    found = []
    for rows in options.rows:
        x = torch.randn(rows, options.width, dtype=torch.bfloat16, device=device)

        def torchs(y: Tensor) -> Tensor:
            mine = part[: y.numel()].view(y.shape)
            summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(mine, y, "sum", group.group_name)
            return summed

        normed = {"one step": own.one_shot, "two steps": own.two_shot}
        expected = own.one_shot(x, residual_TN=x, norm_N=norm, eps=EPS)
        for name, way in normed.items():
            for _ in range(200):  # both places again and again
                if (difference := objection(way(x, residual_TN=x, norm_N=norm, eps=EPS), expected)) is not None:
                    raise SystemExit(f"{name}, {rows} rows: {difference} differs from that in one step")
        ways: dict[str, tuple[Callable[[Tensor], Tensor], Tensor | None]] = {
            "norm alone": (lambda y: y, norm),
            "NCCL": (nccl.all_reduce, norm),
            "torch one-shot": (torchs, norm),
            **{f"{name}, with the norm": (partial(normed_by, way, norm), None) for name, way in normed.items()},
        }
        row: dict[str, Any] = {"rows": rows, "kib": x.numel() * 2 / 1024}
        for name, (call, after) in ways.items():
            dist.barrier()
            row[name] = median_graph_us(chain(call, x, after), device) / CALLS
        found.append(row)
        show(row)
    leave(found, out / "all-reduce.json")


if __name__ == "__main__":
    main()
