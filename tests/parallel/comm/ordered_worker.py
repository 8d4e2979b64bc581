"""One rank of three: ``torchrun -m tests.parallel.comm.ordered_worker``. Fails where an ordered sum is not that of the
parts in rank order, in every bit, for a message of any size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel.comm.ordered_all_reduce import ordered_collectives, rank_ordered_sum


def parts_of(ranks: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """What each rank adds, of very different sizes: in another order a sum has other bits."""
    made = torch.Generator().manual_seed(0)
    scale = torch.randn(ranks, rows, width, generator=made).mul(4).exp()
    return (torch.randn(ranks, rows, width, generator=made) * scale).to(dtype)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    made = ordered_collectives(group, torch.device("cpu"), symmetric=False)
    assert made.batch_invariant
    for dtype in (torch.float32, torch.bfloat16):
        parts = parts_of(made.size, 40, 48, dtype)
        whole = rank_ordered_sum(parts)
        told_apart = not torch.equal(whole, rank_ordered_sum(parts.flip(0)))
        assert told_apart or dtype == torch.bfloat16, "the parts do not tell orders apart"
        for rows in (slice(0, 40), slice(3, 4), slice(7, 30)):
            found = made.all_reduce(parts[made.rank, rows].clone())
            assert torch.equal(found, whole[rows]), (dtype, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
