"""What a product and the sum behind it cost on two GPUs, where the product pushes its part and where the sum does.

Run: python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.push --out FOLDER \
  [--rows 1 8 ...] [--finalists 6] [--compile-workers 26]

The products are o and down of half of Qwen3-8B, each followed by the sum with residual and norm: the median over
replays of a graph of such pairs, over more weights than the L2 holds, divided by their number. For each shape the first
rank times all of our kernels alone; the fastest few of them, cuBLAS and what the table says are then timed with the
sum, by both ranks at once. FOLDER/push.json has every time, and grows with each shape.

Knows: how one product and one sum are timed. Does not know: what surrounds them in a layer (launch/tune).
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

from models.kernels.matmul import autotune
from models.kernels.matmul.choice_table import Blas, Choice, ChoiceTable, LinearShape
from models.kernels.matmul.dispatch import PUSH_KERNELS
from models.kernels.nvidia import NvidiaKernels
from parallel.comm.all_reduce_dispatch import ROW_BYTES, ROWS
from parallel.comm.peer_buffers import PeerBuffers, peer_buffer_bytes
from parallel.comm.symmetric_all_reduce import SymmetricCollectives
from tests.bench.dense_shapes import BF16, MODELS
from tests.bench.kernels import compile_all, run_share, short_name

RANKS = 2
COLD_BYTES = 256 << 20
MODEL = MODELS["8B-tp2"]
EPS = 1e-6


def shapes(rows: list[int]) -> dict[str, LinearShape]:
    return {f"{name} x{m}": MODEL.products(m)[name] for m in rows for name in ("o", "down")}


def ours(kernels: NvidiaKernels, shape: LinearShape) -> list[Choice]:
    return [choice for choice in kernels.matmul.candidates(shape) if isinstance(choice, PUSH_KERNELS)]


# -- compiling: by processes beside this one, into Triton's cache on disk ----------------------------------------------


def compile_alone(index: int, share: int, rows: list[int]) -> None:
    kernels = NvidiaKernels(torch.device("cuda", 0), prefill="triton")
    todo: dict[Any, Callable[[], Any]] = {
        (shape.key, choice): partial(run, kernels, shape, choice, None)
        for shape in shapes(rows).values()
        for choice in ours(kernels, shape)
    }
    run_share(index, share, todo)


def compile_pushing(index: int, share: int, tables: list[tuple[LinearShape, str]]) -> None:
    """Both ranks' code; what it pushes goes to memory of this process."""
    device = torch.device("cuda", 0)
    kernels = NvidiaKernels(device, prefill="triton")
    use_counts = torch.zeros(ROWS, dtype=torch.int32, device=device)
    memory = torch.zeros(peer_buffer_bytes(RANKS, ROWS, ROW_BYTES), dtype=torch.uint8, device=device)
    todo: dict[Any, Callable[[], Any]] = {}
    for shape, text in tables:
        for choice in choices_of(text):
            for rank in range(RANKS):
                buffers = PeerBuffers((memory.data_ptr(),) * RANKS, use_counts, rank, ROWS, ROW_BYTES)
                todo[shape.key, choice, rank] = partial(run, kernels, shape, choice, buffers)
    run_share(index, share, todo)


def run(kernels: NvidiaKernels, shape: LinearShape, choice: Choice, buffers: PeerBuffers | None) -> None:
    x = torch.zeros(shape.rows, shape.inner, dtype=BF16, device=kernels.device)
    weight = torch.zeros(shape.outputs, shape.inner, dtype=BF16, device=kernels.device)
    kernels.matmul.run(x, weight, None, choice, gate_up=False, buffers=buffers)


def choices_of(text: str) -> list[Choice]:
    return [*ChoiceTable.from_json(text).choices.values()]


# -- timing ------------------------------------------------------------------------------------------------------------


class Pairs:
    """Products of one shape, each with its sum and norm, over weights of which each is read once a replay."""

    def __init__(self, made: SymmetricCollectives, kernels: NvidiaKernels, shape: LinearShape) -> None:
        self._made, self._kernels = made, kernels
        device = kernels.device
        copies = -(-COLD_BYTES // (2 * shape.outputs * shape.inner))
        self._x = torch.randn(shape.rows, shape.inner, dtype=BF16, device=device)
        self._weights = torch.randn(copies, shape.outputs, shape.inner, dtype=BF16, device=device)
        self._weights.mul_(shape.inner**-0.5)
        self._residual = torch.randn(shape.rows, shape.outputs, dtype=BF16, device=device)
        self._norm = torch.ones(shape.outputs, dtype=BF16, device=device)
        self._buffers = made.push_buffers(shape.rows, shape.outputs, BF16)

    def us(self, choice: Choice, *, pushed: bool) -> float:
        dist.barrier()
        launch = partial(self._all, choice, pushed)
        return autotune.median_graph_us(launch, self._kernels.device) / len(self._weights)

    def _all(self, choice: Choice, pushed: bool) -> None:
        buffers = self._buffers if pushed else None
        for weight in self._weights:
            part = self._kernels.matmul.run(self._x, weight, None, choice, gate_up=False, buffers=buffers)
            self._made.all_reduce_norm(part, self._residual, self._norm, EPS, pushed=pushed)


def fastest_alone(kernels: NvidiaKernels, shape: LinearShape, most: int) -> str:
    product = autotune.ColdProduct(shape, kernels.matmul.runner(shape), kernels.device)
    ranked = sorted(autotune.measure(shape, ours(kernels, shape), product), key=lambda one: one[1])
    return ChoiceTable({str(number): choice for number, (choice, _) in enumerate(ranked[:most])}).to_json()


def bench(made: SymmetricCollectives, args: argparse.Namespace) -> None:
    device = torch.device("cuda", made.rank)
    wanted = shapes(args.rows)
    if made.rank == 0 and args.compile_workers:
        compile_all(compile_alone, (args.rows,), args.compile_workers)
    kernels = NvidiaKernels(device, prefill="triton")
    finalists: list[tuple[LinearShape, str]] = []
    for shape in wanted.values():
        finalists.append((shape, made.broadcast_text(partial(fastest_alone, kernels, shape, args.finalists))))
    if made.rank == 0 and args.compile_workers:
        compile_all(compile_pushing, (finalists,), args.compile_workers)
    dist.barrier()
    if made.rank == 0:
        print("product | cuBLAS us | the table's | best of ours, the sum pushes | best of ours, it pushes", flush=True)
    found: list[dict[str, Any]] = []
    for name, (shape, text) in zip(wanted, finalists, strict=True):
        pairs = Pairs(made, kernels, shape)
        table = kernels.matmul.choice(shape)
        blas, current = pairs.us(Blas(), pushed=False), pairs.us(table, pushed=False)
        timed = {push: [(pairs.us(one, pushed=push), one) for one in choices_of(text)] for push in (False, True)}
        best, pushed = (min(timed[push], key=lambda one: one[0]) for push in (False, True))
        if made.rank == 0:
            shown = " | ".join(f"{us:.2f} {short_name(one)}" for us, one in ((current, table), best, pushed))
            print(f"{name} | {blas:.2f} | {shown}", flush=True)
            every = [[str(one), us, later] for (us, one), (later, _) in zip(timed[False], timed[True], strict=True)]
            found.append({"product": name, "cublas": blas, "table": [str(table), current], "ours": every})
            (args.out / "push.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for push.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 16, 8, 1])
    parser.add_argument("--finalists", type=int, default=6)
    parser.add_argument("--compile-workers", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    assert dist.group.WORLD is not None
    bench(SymmetricCollectives(dist.group.WORLD, device), args)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # destroying a group whose calls were captured may not return


if __name__ == "__main__":
    main()
