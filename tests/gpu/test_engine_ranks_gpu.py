"""The engine on each of two GPUs, and of four where there are four: no hidden sync, one launch a step or round, and
depths agree, whichever way sums go.

Knows: which jobs are tried, and between how many ranks. Does not know: what a rank must have found: those of
engine_ranks.py check themselves, and what they found comes back here. On a CPU two of the same ranks run over gloo.

Run: python3 -m pytest -m multigpu tests/gpu/test_engine_ranks_gpu.py    # -k two-ranks, -k four-ranks: only those
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.engine_ranks import BLOCK, BLOCKS, GOLDEN, LENGTH, SEED, STEADY, Found, Job, all_ranks, check_device
from tests.gpu.ranks_on_gpus import on_gpus
from tests.gpu.steady_steps import check_mixed
from tests.runtime.engine.rig import rig, run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.speculate.demo_acceptance import golden_rows

SYMMETRIC, SERIAL, NCCL = "symmetric all-reduce", "depth 0", "NCCL, mixed steps"
ROUNDS, SERIAL_ROUNDS = "rounds, mixed steps", "rounds at depth 0"
JOBS = {
    SYMMETRIC: Job(),
    SERIAL: Job(depth=0),
    ROUNDS: Job(speculates=True, mixed_steps=True),
    SERIAL_ROUNDS: Job(speculates=True, depth=0),
    NCCL: Job(symmetric=False, mixed_steps=True),
}

# ---- GPUs ----


@pytest.fixture(scope="module", params=[on_gpus(2), on_gpus(4)])
def ranks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks: int
) -> dict[str, list[Found]]:
    """Of all ranks, by job. What they say is not captured: it tells where they were, should nobody wait for them."""
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with nullcontext() if capture is None else capture.global_and_fixture_disabled():
        return all_ranks(tmp_path_factory.mktemp("ranks"), "cuda", JOBS, ranks)


@pytest.mark.multigpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("job", JOBS)
def test_all_ranks_find_what_they_should(found: dict[str, list[Found]], ranks: int, job: str) -> None:
    assert [one["rank"] for one in found[job]] == [*range(ranks)]


@pytest.mark.multigpu
@pytest.mark.multiprocess
def test_depths_agree(found: dict[str, list[Found]]) -> None:
    assert found[SYMMETRIC][0]["tokens"] == found[SERIAL][0]["tokens"]


@pytest.mark.multigpu
@pytest.mark.multiprocess
def test_rounds_give_the_tokens_of_single_steps_at_either_depth(found: dict[str, list[Found]]) -> None:
    """In float32; as many guesses are kept on all ranks, which engine_ranks.py compares request by request."""
    for job in (ROUNDS, SERIAL_ROUNDS):
        assert found[job][0]["golden"] == golden("cuda")


# ---- no GPU ----


def golden(device: str) -> list[list[int]]:
    """What the demo model says in steps of one token, on one rank."""
    return [row["token_ids"] for row in golden_rows()[: GOLDEN[device]]]


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_same_ranks_on_a_cpu(tmp_path: Path) -> None:
    found = all_ranks(tmp_path, "cpu", {SYMMETRIC: JOBS[SYMMETRIC]}, ranks=2)
    with rig(depth=0, block_size=BLOCK, blocks=BLOCKS, max_model_len=LENGTH) as engine:
        alone = outcome(run(engine, mixture(SEED)))
    assert found[SYMMETRIC][1]["tokens"] == [[i, *tokens] for i, (tokens, _) in sorted(alone.items())]


@pytest.mark.long
@pytest.mark.multiprocess
def test_rounds_of_the_same_ranks_on_a_cpu(tmp_path: Path) -> None:
    found = all_ranks(tmp_path, "cpu", {ROUNDS: JOBS[ROUNDS]}, ranks=2)
    assert found[ROUNDS][1]["golden"] == golden("cpu")


WELL = {
    "cudaGraphLaunch": STEADY,
    "Memcpy HtoD (Pinned -> Device)": 24,
    "cudaDeviceSynchronize": 2,
    "_all_reduce_kernel": 4 * STEADY,
}


@pytest.mark.parametrize(
    "seen",
    [
        {"cudaGraphLaunch": STEADY + 1},
        {"Memcpy HtoD (Pageable -> Device)": 1},
        {"Memcpy DtoH (Device -> Pageable)": 2},
        {"Memcpy DtoH (Device -> Pinned)": 1},
        {"cudaStreamSynchronize": 1},
        {"cudaDeviceSynchronize": 3},
        {"cudaMallocAsync": 1},
        {"cudaLaunchKernel": 200},
        {"cudaStreamBeginCapture": 1},
        {"ncclDevKernel_AllReduce_Sum_bf16_RING_LL": 1},
        {"ncclDevKernel_AllGather_RING_LL": 1},
        {"_all_reduce_kernel": 0},
    ],
    ids=str,
)
def test_a_breach_is_found(seen: dict[str, int]) -> None:
    grown = {"steps": STEADY, "host_to_device_copies": 24}
    check_device(Counter(WELL), grown, symmetric=True)
    with pytest.raises(AssertionError):
        check_device(Counter(WELL | seen), grown, symmetric=True)


@pytest.mark.parametrize(
    "seen",
    [
        {"cudaGraphLaunch": 116},
        {"Memcpy HtoD (Pinned -> Device)": 36},
        {"Memcpy HtoD (Pageable -> Device)": 1},
        {"Memcpy DtoH (Device -> Pinned)": 1},
        {"cudaStreamSynchronize": 1},
        {"cudaMallocAsync": 1},
    ],
    ids=str,
)
def test_a_breach_of_steps_with_chunks_is_found(seen: dict[str, int]) -> None:
    """Of 90 steps, of which 11 have chunks, 3 of these beside windows."""
    grown = {"steps": 90, "prefill_steps": 1, "mixed_steps": 10, "host_to_device_copies": 24}
    well = {"cudaGraphLaunch": 104, "Memcpy HtoD (Pinned -> Device)": 24}
    apart = {"Memcpy HtoD (Pinned -> Device)": 24 + 11}
    check_mixed(Counter(well), grown, windows=3)
    check_mixed(Counter(well | apart), grown, windows=3, plans_apart=True)
    with pytest.raises(AssertionError):
        check_mixed(Counter(well | seen), grown, windows=3)
    with pytest.raises(AssertionError):
        check_mixed(Counter(well | apart | seen), grown, windows=3, plans_apart=True)
    with pytest.raises(AssertionError):
        check_mixed(Counter(well | apart), grown, windows=3)
