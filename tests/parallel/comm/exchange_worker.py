"""One rank of two groups of two that share experts: ``torchrun -m tests.parallel.comm.exchange_worker FOLDER gloo``.

Group g answers ``prompts_of(g)``; its first rank writes FOLDER/group.G.safetensors. ``answers`` is what one computes.
With ``memory`` instead of ``gloo``, and TRITON_INTERPRET=1, exchanges go the way that they go on GPUs, interpreted,
through files that both ranks map.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm import symmetric_exchange
from parallel.comm.collectives import Collectives, GroupCollectives
from parallel.comm.peer_buffers import SENTINEL
from parallel.comm.symmetric_exchange import GroupExchange
from parallel.layers.experts import ExpertSplit
from parallel.topology import ParallelDegrees
from tests.models.kernels.paged_driver import PagedDriver
from tests.models.tiny_checkpoint import TINY
from tests.plant import reference_kernels

CONFIG: dict[str, Any] = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
}
SHARING = ParallelDegrees(world=4, tensor=2, expert=4)


def prompts_of(group: int) -> list[list[int]]:
    """Of the same lengths in both groups, which makes their steps alike."""
    draw = random.Random(group)
    return [[draw.randrange(TINY["vocab_size"]) for _ in range(length)] for length in (7, 2, 11)]


def answers(group: int, collectives: Collectives, split: ExpertSplit) -> dict[str, Tensor]:
    model = load_model(
        config_from_dict(CONFIG),
        None,
        load_format="dummy",
        collectives=collectives,
        kernels=reference_kernels(),
        experts=split,
    )
    rows = PagedDriver(model, pages=40).generate(prompts_of(group), new_tokens=5)
    return {
        "tokens": torch.tensor([row.tokens[-5:] for row in rows]),
        "logits": torch.stack([torch.stack(row.logits) for row in rows]),
    }


class FileMemory:
    """As symmetric_memory.SentinelMemory, of files in ``folder``."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, device: torch.device, size_bytes: int) -> None:
        def mapped(rank: int) -> Tensor:
            return torch.from_file(str(folder / f"memory.{rank}"), shared=True, size=size_bytes // 2, dtype=torch.int16)

        mapped(dist.get_rank()).fill_(SENTINEL)
        dist.barrier(group)
        self._mapped = [mapped(rank) for rank in dist.get_process_group_ranks(group)]
        self.addresses = tuple(memory.data_ptr() for memory in self._mapped)


def exchange_over(way: str, folder: Path, group: dist.ProcessGroup) -> GroupExchange:
    if way == "gloo":
        return GroupExchange(group)
    symmetric: Any = symmetric_exchange
    symmetric.SentinelMemory = partial(FileMemory, folder)
    symmetric.has_dependent_launches = lambda device: False
    return symmetric_exchange.SymmetricExchange(group, torch.device("cpu"))


def main(folder: Path, way: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sharing: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3), (0, 2), (1, 3))
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sharing}
    mine, across = groups[SHARING.tensor_group(rank)], groups[SHARING.data_group(rank)]
    exchange = exchange_over(way, folder, across)
    found = answers(rank // 2, GroupCollectives(mine), ExpertSplit(whole=True, exchange=exchange))
    if isinstance(exchange, symmetric_exchange.SymmetricExchange):
        counts = exchange._dispatch_rows.keywords["buffers"].use_counts
        assert exchange.calls.snapshot().made == counts[0] > 0, "an exchange went another way"
    if rank % 2 == 0:
        save_file(found, folder / f"group.{rank // 2}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
