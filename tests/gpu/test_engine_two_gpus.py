"""The engine on each of two GPUs: no hidden sync, one launch a step, and depths agree, whichever way sums go.

Both ranks of two_ranks.py check themselves; what they found comes back here. On a CPU the same ranks run over gloo.

Run: python3 -m pytest -m multigpu tests/gpu/test_engine_two_gpus.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.two_ranks import BLOCK, BLOCKS, LENGTH, RANKS, SEED, STEADY, Found, both_ranks, check_device
from tests.runtime.engine.rig import rig, run
from tests.runtime.engine.test_depths import mixture, outcome

# ---- two GPUs ----


@pytest.fixture(scope="module")
def symmetric(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return both_ranks(tmp_path_factory.mktemp("symmetric"), "cuda")


@pytest.mark.multigpu
@pytest.mark.multiprocess
def test_both_ranks_with_the_symmetric_all_reduce(symmetric: list[Found]) -> None:
    assert len(symmetric) == RANKS


@pytest.mark.multigpu
@pytest.mark.multiprocess
def test_both_ranks_with_nccl(tmp_path: Path) -> None:
    assert len(both_ranks(tmp_path, "cuda", symmetric=False, mixed_steps=True)) == RANKS


@pytest.mark.multigpu
@pytest.mark.multiprocess
def test_depths_agree(symmetric: list[Found], tmp_path: Path) -> None:
    serial = both_ranks(tmp_path, "cuda", depth=0)
    assert symmetric[0]["tokens"] == serial[0]["tokens"]


# ---- no GPU ----


@pytest.mark.multiprocess
def test_the_same_ranks_on_a_cpu(tmp_path: Path) -> None:
    found = both_ranks(tmp_path, "cpu")
    with rig(depth=0, block_size=BLOCK, blocks=BLOCKS, max_model_len=LENGTH) as engine:
        alone = outcome(run(engine, mixture(SEED)))
    assert found[1]["tokens"] == [[i, *tokens] for i, (tokens, _) in sorted(alone.items())]


WELL = {
    "cudaGraphLaunch": STEADY,
    "Memcpy HtoD (Pinned -> Device)": 24,
    "Memcpy DtoH (Device -> Pinned)": STEADY + 2,
    "cudaDeviceSynchronize": 2,
    "_all_reduce_kernel": 4 * STEADY,
}


@pytest.mark.parametrize(
    "seen",
    [
        {"cudaGraphLaunch": STEADY + 1},
        {"Memcpy HtoD (Pageable -> Device)": 1},
        {"Memcpy DtoH (Device -> Pageable)": 2},
        {"cudaStreamSynchronize": 1},
        {"cudaDeviceSynchronize": 3},
        {"cudaMallocAsync": 1},
        {"cudaStreamBeginCapture": 1},
        {"ncclDevKernel_AllReduce_Sum_bf16_RING_LL": 1},
        {"_all_reduce_kernel": 0},
    ],
    ids=str,
)
def test_a_breach_is_found(seen: dict[str, int]) -> None:
    grown = {"steps": STEADY, "host_to_device_copies": 24}
    check_device(Counter(WELL), grown, symmetric=True)
    with pytest.raises(AssertionError):
        check_device(Counter(WELL | seen), grown, symmetric=True)
