"""Draft trees over slot state on a GPU: kernels against the recurrences, captured; engines over the demo's hybrid.

The same without a GPU, in float32: tests/models/kernels/interpreted_recurrent.py and interpreted_mamba.py, and
tests/runtime/engine/test_recurrent_rounds.py.
Run: python3 -m pytest -m gpu tests/gpu/test_hybrid_trees_gpu.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import StateRows, StateTree
from models.ops.select import select_kernels
from runtime.execute.device.cuda import CudaDevice
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.gpu.steady_steps import count_steady_steps
from tests.gpu.test_engine_gpu import gpu_rig
from tests.gpu.test_mamba_gpu import HYBRID as NEMOTRON
from tests.models.kernels.nvidia_kernels import Nvidia, nvidia_kernels
from tests.models.kernels.recurrent.delta_cases import DeltaCase
from tests.models.kernels.recurrent.mamba_cases import banks, random_weights, width
from tests.models.kernels.recurrent.tree_cases import CHAIN, FORKED, STAR, grown, padded, path, positions, state_tree
from tests.plant import Kernels, reference_kernels
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.same_bits import answers, difference, plainly
from tests.runtime.speculate.demo_acceptance import DEMO, HYBRID, TREE_SIZES, WIDEST, golden_rows, tree_acceptance
from tests.runtime.speculate.test_demo_drafters import check_hybrid_tokens

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
REFERENCE = reference_kernels()
# Relative to the norm. float32 through tf32x3 products. bfloat16: products with state are in TF32, convolutions are
# rounded to bfloat16 by both sides, which flips a last bit here and there.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
Operation = Callable[[Kernels, Tensor, list[Tensor], StateRows, Tensor], Tensor]


@pytest.fixture(scope="module")
def kernels() -> Nvidia:
    return nvidia_kernels(DEVICE)


def off(found: Tensor, expected: Tensor) -> float:
    assert bool(found.isfinite().all())
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def delta_net(dtype: torch.dtype) -> tuple[int, list[Tensor], Operation]:
    """(columns of a projection, banks of eight slots, the operation), as Qwen3-Next has them on two ranks."""
    made = DeltaCase(8, 16, 128, 128, (1,) * 5, dtype, device=DEVICE).made()

    def run_it(k: Kernels, x: Tensor, of: list[Tensor], rows: StateRows, positions_T: Tensor) -> Tensor:
        return k.conv_gated_delta(x, made.weight_CJ, of[0], made.rule, of[1], rows, positions_T)

    window, state = (bank.normal_() for bank in (made.window_SJC, made.state_SHVK))
    return made.projected[0].shape[1], [window, state / 8], run_it


def mamba(dtype: torch.dtype) -> tuple[int, list[Tensor], Operation]:
    """As Nemotron-3-Nano has it."""
    torch.manual_seed(1)
    weights = random_weights(64, 64, 8, 128, 4, dtype, device="cuda")

    def run_it(k: Kernels, x: Tensor, of: list[Tensor], rows: StateRows, positions_T: Tensor) -> Tensor:
        return k.mamba2(x, weights, of[0], of[1], rows, positions_T)

    return width(weights), list(banks(weights, dtype, slots=8)), run_it


def some_trees(nodes: int, turn: int) -> list[list[int]]:
    shapes = [CHAIN, STAR, FORKED] if nodes == len(CHAIN) else [grown(nodes, 7 * turn + seed) for seed in range(3)]
    return [*shapes, grown(nodes, 5)]


@pytest.mark.parametrize("nodes", [7, 16, 32, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [delta_net, mamba])
def test_captured_rounds_follow_the_recurrence(
    kernels: Nvidia,
    make: Callable[[torch.dtype], tuple[int, list[Tensor], Operation]],
    dtype: torch.dtype,
    nodes: int,
) -> None:
    """Verify and commit of four rows, one of them nobody's; replayed with other trees, slots and paths each time. State
    is as it was behind a verify. NaN in a leaf, in nobody's row, and at the commit in every node off the path."""
    columns, mine, operation = make(dtype)
    longest = min(9, nodes)
    for bank in mine:
        bank[0] = bank[-1] = math.nan
    theirs = [bank.clone() for bank in mine]
    x = torch.zeros(4 * nodes, columns, dtype=dtype, device=DEVICE)
    on_path = torch.zeros(4 * nodes, 1, dtype=torch.bool, device=DEVICE)
    slots, at = (
        torch.zeros(4, dtype=torch.int64, device=DEVICE),
        torch.zeros(4 * nodes, dtype=torch.int64, device=DEVICE),
    )
    tree = state_tree([CHAIN[:1] * nodes] * 4, DEVICE)
    kept, ways = torch.zeros(4, dtype=torch.int32, device=DEVICE), slots.new_zeros(4, longest)
    verifying = StateRows(slots, frozen=True, tree=tree)
    taking = StateRows(slots, kept_B=kept, tree=tree, path_BW=ways)

    def both(k: Kernels, of: list[Tensor]) -> Tensor:
        out = operation(k, x, of, verifying, at)
        operation(k, x.masked_fill(~on_path, math.nan), of, taking, at)
        return out

    both(kernels, mine)  # of the null slot only
    operation(kernels, x, mine, verifying, at)
    torch.cuda.synchronize()
    verify, whole = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(verify):
        operation(kernels, x, mine, verifying, at)
    with torch.cuda.graph(whole):
        found = both(kernels, mine)
    for turn in range(4):
        parents = some_trees(nodes, turn)
        ids = (1 + torch.randperm(6)[:4]).tolist()
        ids[turn] = 0
        leaf = nodes * ((turn + 1) % 4) + nodes - 1
        starts = [0 if turn == 0 else 3 * turn + row for row in range(4)]
        fresh = state_tree(parents, DEVICE)
        tree.parents_BN.copy_(fresh.parents_BN)
        tree.seen_BN.copy_(fresh.seen_BN)
        paths = [path(of_row, nodes - 2 - row)[:longest] for row, of_row in enumerate(parents)]
        counts = [0 if ids[row] == 0 else max(1, len(paths[row]) - row) for row in range(4)]
        slots.copy_(torch.tensor(ids))
        at.copy_(positions(parents, starts))
        kept.copy_(torch.tensor(counts))
        ways.copy_(padded(paths, longest))
        on_path.zero_()
        on_path[[nodes * row + n for row in range(4) for n in paths[row][: counts[row]]]] = True
        x.normal_()
        x[nodes * turn : nodes * (turn + 1)] = math.nan
        x[leaf] = math.nan
        before = [bank.clone() for bank in mine]
        verify.replay()
        assert all(torch.equal(bank[1:-1], old[1:-1]) for bank, old in zip(mine, before, strict=True))
        whole.replay()
        expected = both(REFERENCE, theirs)
        seen = torch.ones(4 * nodes, dtype=torch.bool, device=DEVICE)
        seen[nodes * turn : nodes * (turn + 1)] = False
        seen[leaf] = False
        assert off(found[seen], expected[seen]) < BOUNDS[dtype], ("verify", turn)
        assert bool(found[leaf].isnan().any())
        assert off(mine[1][1:-1], theirs[1][1:-1]) < BOUNDS[dtype], ("state", turn)
        assert torch.equal(mine[0][1:-1], theirs[0][1:-1])
    assert bool(mine[0][-1].isnan().all())
    assert bool(mine[1][-1].isnan().all())


@pytest.mark.parametrize("make", [delta_net, mamba])
def test_a_path_is_taken_in_with_the_bits_of_a_chain(
    kernels: Nvidia, make: Callable[[torch.dtype], tuple[int, list[Tensor], Operation]]
) -> None:
    """The same tokens, once as nodes of a tree and once as a window of their own."""
    columns, mine, operation = make(torch.bfloat16)
    chains = [bank.clone() for bank in mine]
    parents, count = grown(32, 3), 5
    way = path(parents, 31)[:count]
    x = torch.randn(32, columns, device=DEVICE).to(torch.bfloat16)
    slots, kept = torch.tensor([2], device=DEVICE), torch.tensor([count], dtype=torch.int32, device=DEVICE)
    rows = StateRows(slots, kept_B=kept, tree=state_tree([parents], DEVICE), path_BW=padded([way], 8, DEVICE))
    operation(kernels, x, mine, rows, positions([parents], [6]).to(DEVICE))
    window = x[way].contiguous()
    operation(kernels, window, chains, StateRows(slots, kept_B=kept), torch.arange(6, 6 + count, device=DEVICE))
    assert all(torch.equal(one[2], other[2]) for one, other in zip(mine, chains, strict=True))


# ---- engines ----


def hybrid(dtype: torch.dtype, depth: int, **more: Any) -> Any:
    """The demo's hybrid with the MTP layer of its own checkpoint, as trees."""
    size = TREE_SIZES["mtp"]
    keys = {"method": "mtp", "num_speculative_tokens": WIDEST["mtp"], "tree_size": size}
    kernels = select_kernels(torch.device(DEVICE), dtype, 64, "triton")
    limits: dict[str, Any] = {"rows": 16, "blocks": 1200, "max_model_len": 640, "max_prefill_tokens": 512}
    limits |= {"folder": HYBRID, "dtype": dtype, "kernels": kernels, "prefill_buckets": (128, 512), "tree": size}
    limits |= {"proposer": proposer_for(speculative_config(keys), target_folder=HYBRID), "widths": (WIDEST["mtp"] + 1,)}
    return gpu_rig("triton", depth=depth, **(limits | more))


@pytest.mark.parametrize("depth", [0, 2])
def test_float32_gives_the_golden_tokens(depth: int) -> None:
    requests = [
        request(i, row["prompt_token_ids"], max_tokens=len(row["token_ids"]), stops=(0, 3))
        for i, row in enumerate(golden_rows(HYBRID))
    ]
    with hybrid(torch.float32, depth) as engine:
        finished = run(engine, requests)
        engine.stop()
        found = tree_acceptance("mtp", dict(engine.counters))
    check_hybrid_tokens(finished)
    assert found["accepted_length"] > 3.4  # 3.57 on a CPU


def synthetic(dtype: torch.dtype, **more: Any) -> Any:
    """A tiny Nemotron-H with scripted acceptance."""
    keys = {"method": "synthetic", "num_speculative_tokens": 7, "tree_size": 32, "synthetic_acceptance_length": 4}
    proposer = proposer_for(speculative_config(keys), load_format="dummy")
    limits: dict[str, Any] = {"shape": NEMOTRON, "widths": (8,), "proposer": proposer, "tree": 32, "blocks": 400}
    return gpu_rig("triton", depth=2, dtype=dtype, **(limits | more))


@pytest.mark.parametrize("make", [partial(hybrid, depth=2), synthetic], ids=["gated delta nets", "Mamba-2"])
def test_a_round_is_one_captured_launch_without_a_sync(make: Callable[..., Any]) -> None:
    requests = [request(i, range(3 + i, 20 + i), max_tokens=90, stops=()) for i in range(8)]
    with make(torch.bfloat16, block_size=64) as engine:
        count_steady_steps(engine, requests)
        assert engine.counters["spec_num_accepted_tokens"] > 0


@pytest.mark.parametrize(("folder", "method"), [(DEMO, "dflash"), (HYBRID, "mtp")], ids=["attention", "hybrid"])
def test_the_deterministic_mode_changes_no_bit(folder: Path, method: str) -> None:
    """Trees at two depths against single steps of the plainest engine, tokens and log-probabilities."""
    requests = [
        request(i, row["prompt_token_ids"], max_tokens=40, stops=(0, 3), logprobs=3, temperature=0.8 * (i % 2))
        for i, row in enumerate(golden_rows(folder)[:8])
    ]

    def open_rig(**limits: Any) -> Any:
        device = CudaDevice(torch.device(DEVICE))
        common: dict[str, Any] = {"dtype": torch.bfloat16, "block_size": 16, "max_model_len": 640, "folder": folder}
        common["kernels"] = select_kernels(device.torch_device, torch.bfloat16, 64, deterministic=True)
        return rig(device=device, **(common | limits))

    expected = plainly(open_rig, requests)
    keys: dict[str, Any] = {"method": method, "num_speculative_tokens": WIDEST[method]}
    keys |= {"tree_size": TREE_SIZES[method]} | ({"model": str(DEMO / method)} if folder == DEMO else {})
    proposer = proposer_for(speculative_config(keys), target_folder=folder)
    trees: dict[str, Any] = {"proposer": proposer, "widths": (WIDEST[method] + 1,), "tree": TREE_SIZES[method]}
    for depth, rows in ((0, 1), (2, 8)):
        with open_rig(depth=depth, rows=rows, blocks=600, **trees) as engine:
            found = answers(engine, requests)
            assert engine.counters["spec_num_accepted_tokens"] > 0
        told = difference(found, expected)
        assert (told.flips, told.bits) == (0, 0), told
        assert told.compared > 100


def test_trees_have_the_masks_that_attention_has() -> None:
    """What tree_cases.py lays out is what a round does (runtime/execute/sampling/draft_tree.py)."""
    from runtime.execute.sampling.draft_tree import lay_out

    parents = [grown(33, seed) for seed in range(4)]
    tree: StateTree = state_tree(parents, DEVICE)
    found = lay_out(torch.tensor(parents, device=DEVICE)[:, 1:].contiguous(), 32)
    assert torch.equal(found.seen_BN, tree.seen_BN)
    assert torch.equal(found.parents_BN, tree.parents_BN)
