"""Draft trees in Triton against torch: growth, layout, the walk and the move of entries; engines with trees on a GPU.

Without a GPU, as CI does it, all but the engines: ``make interpreted``.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.execute.cache import block_copy
from runtime.execute.cache.block_copy import EntryMover
from runtime.execute.sampling.draft_tree import DraftTree, lay_out_in_torch, walk_in_torch
from runtime.speculate.tree import grow_in_torch
from tests.plant import reference_kernels

grow_trees = pytest.importorskip("runtime.speculate.tree_triton").grow_trees
tree_kernels = pytest.importorskip("runtime.execute.sampling.draft_tree_triton")
move_entries = pytest.importorskip("runtime.execute.cache.block_copy_triton").move_entries

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.models.kernels.interpreted_kernels")  # mends Triton's interpreter for today's numpy
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [(1, 2, 3), (3, 8, 12), (7, 8, 16), (7, 8, 33), (15, 4, 32)]  # depth, candidates a place, tokens of a tree
ENGINES = pytest.mark.skipif(INTERPRETED, reason="an engine in the interpreter is interpreted_kernels.py's")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, with which the interpreter computes
]


def candidates(rows: int, depth: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of them equally likely, some impossible."""
    torch.manual_seed(depth + top_k)
    logprobs = (2 * torch.randn(rows, depth, top_k)).round().log_softmax(-1).sort(-1, descending=True).values
    logprobs[0, -1, 1:] = float("-inf")
    logprobs[-1, 0, -1] = float("nan")
    ids = torch.rand(rows, depth, 50).argsort(-1)[:, :, :top_k]
    return ids.to(DEVICE), logprobs.to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_grow_the_same(shape: tuple[int, int, int]) -> None:
    depth, top_k, size = shape
    ids, logprobs = candidates(5, depth, top_k)
    found, expected = (grow(ids, logprobs, size - 1) for grow in (grow_trees, grow_in_torch))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ancestors_and_paths_are_the_same(shape: tuple[int, int, int]) -> None:
    depth, top_k, size = shape
    ids, logprobs = candidates(5, depth, top_k)
    tokens, parents = grow_in_torch(ids, logprobs, size - 1)
    expected = lay_out_in_torch(parents, depth)
    found = DraftTree(*tree_kernels.lay_out(parents, depth))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    tokens_BN = torch.nn.functional.pad(tokens, (1, 0))
    right = torch.randint(top_k, (5, size), device=DEVICE) // 2  # the likelier ones more often
    place = expected.depth_BN.clamp(max=depth - 1)
    drawn = ids.gather(1, place[:, :, None].expand(-1, -1, top_k)).gather(2, right[:, :, None])[:, :, 0]
    for scripted in (False, True):
        way = walk_in_torch(tokens_BN, expected, drawn, depth, scripted=scripted)
        nodes, guesses = tree_kernels.walk(tokens_BN, expected.parents_BN, drawn, depth, scripted)
        assert torch.equal(nodes, way.nodes_BW)
        assert torch.equal(guesses, way.guesses_BQ)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 8, 128), (8, 2, 16), (4, 1, 12)], ids=str)  # page, key/value heads, head_dim
def test_entries_are_moved_the_same(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Ascending paths whose entries move onto places that others came from."""
    page, kv_heads, dim = shape
    torch.manual_seed(page)
    layers = [torch.randn(2, 9, page, kv_heads, dim, device=DEVICE).to(dtype) for _ in range(3)]
    expected = [layer.clone() for layer in layers]
    width, nodes = 5, 12
    places_BN = torch.randperm(8 * page)[: 2 * nodes].view(2, nodes) + page
    paths_BW = torch.tensor([[0, 1, 2, 4, 9], [0, 2, 5, 6, 11]])
    sources, targets = places_BN.gather(1, paths_BW).to(DEVICE), places_BN[:, :width].to(DEVICE)
    count = torch.tensor([5, 3], dtype=torch.int32, device=DEVICE)
    for layer in expected:
        flat = layer.flatten(1, 2)
        for row, kept in enumerate(count.tolist()):
            flat[:, targets[row, :kept]] = flat[:, sources[row, :kept]].clone()
    if INTERPRETED:
        addresses = torch.tensor([layer.data_ptr() for layer in layers])
        move_entries(addresses, sources, targets, count, 9 * page, layers[0][0, 0, 0].nbytes // 4)
    else:
        EntryMover(layers).move(sources, targets, count)
    assert all(torch.equal(layer, wanted) for layer, wanted in zip(layers, expected, strict=True))


def test_torch_moves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "_move_kernel", lambda: None)
    layer = torch.randn(2, 3, 4, 2, 8, device=DEVICE)
    expected = layer.clone()
    expected.flatten(1, 2)[:, [5, 6]] = layer.flatten(1, 2)[:, [6, 9]]
    sources = torch.tensor([[4, 6, 9, 7]], device=DEVICE)
    targets = torch.tensor([[4, 5, 6, 7]], device=DEVICE)
    EntryMover([layer]).move(sources, targets, torch.tensor([3], dtype=torch.int32, device=DEVICE))
    assert torch.equal(layer, expected)


@ENGINES
@pytest.mark.parametrize(("rows", "new"), [(1, 32), (8, 33), (32, 32), (64, 16)])
def test_attention_over_trees_is_the_references(rows: int, new: int) -> None:
    """As 8B has it, with a list of splits (from 32 rows on) and without."""
    from models.inputs import DecodeAttention
    from tests.models.kernels.nvidia_kernels import nvidia_kernels

    torch.manual_seed(rows)
    heads, kv_heads, dim, page, pages = 32, 8, 128, 16, 100
    kernels = nvidia_kernels("cuda", prefill="triton")
    kv = torch.randn(2, 1 + rows * pages, page, kv_heads, dim, device="cuda").to(torch.bfloat16)
    table = (1 + torch.randperm(rows * pages, device="cuda")).view(rows, pages).to(torch.int32)
    lengths = torch.randint(new, pages * page, (rows,), device="cuda", dtype=torch.int32)
    parents = (torch.rand(rows, new - 1, device="cuda") * torch.arange(1, new, device="cuda")).long()
    seen = lay_out_in_torch(parents, new).seen_BN
    inputs = DecodeAttention(table, lengths, new, pages * page, tree_BQ=seen)
    q = torch.randn(rows * new, heads, dim, device="cuda").to(torch.bfloat16)
    expected = reference_kernels().decode_attention(q, kv, inputs, dim**-0.5).float().contiguous()
    for planned in (inputs, kernels.plan_decode(inputs, heads, kv)):
        found = kernels.decode_attention(q, kv, planned, dim**-0.5).float()
        assert float((found - expected).norm() / expected.norm()) < 1e-2
    lengths[1::2] = 0  # beside chunks every second row is one: its tokens are left as they are
    beside = kernels.plan_decode(replace(inputs, skip_empty=True), heads, kv)
    found = kernels.decode_attention(q, kv, beside, dim**-0.5, torch.full_like(q, 7.0)).float()
    expected.view(rows, -1)[1::2] = 7.0
    assert float((found - expected).norm() / expected.norm()) < 1e-2


# ---- engines ----


def rig_of(method: str, size: int, dtype: torch.dtype, **more: Any) -> Any:
    from models.ops.select import select_kernels
    from runtime.speculate.methods import proposer_for
    from runtime.speculative_config import speculative_config
    from tests.gpu.test_engine_gpu import gpu_rig
    from tests.runtime.speculate.demo_acceptance import DEMO, WIDEST

    keys = {"method": method, "model": str(DEMO / method), "num_speculative_tokens": WIDEST[method], "tree_size": size}
    kernels = select_kernels(torch.device("cuda:0"), dtype, 64, "triton")
    limits: dict[str, Any] = {"rows": 16, "blocks": 1200, "max_model_len": 640, "max_prefill_tokens": 512}
    limits |= {"folder": DEMO, "dtype": dtype, "kernels": kernels, "prefill_buckets": (128, 512), "tree": size}
    limits |= {"proposer": proposer_for(speculative_config(keys)), "widths": (WIDEST[method] + 1,)}
    return gpu_rig("triton", **(limits | more))


@ENGINES
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("method", "size"), [("dflash", 16), ("dflash", 32), ("mtp", 16)])
def test_float32_gives_the_golden_tokens(method: str, size: int, depth: int) -> None:
    from tests.gpu.test_drafters_gpu import asked
    from tests.runtime.engine.rig import run
    from tests.runtime.speculate.demo_acceptance import TREE_SIZES, acceptance, golden_rows

    with rig_of(method, size, torch.float32, depth=depth) as engine:
        finished = run(engine, asked())
        engine.stop()
        found = acceptance(method, dict(engine.counters))
    assert [list(finished[i].token_ids) for i in range(len(finished))] == [row["token_ids"] for row in golden_rows()]
    if size == TREE_SIZES[method]:
        assert found["accepted_length"] > 3.0


@ENGINES
@pytest.mark.parametrize(("method", "size", "depth"), [("dflash", 32, 2), ("mtp", 16, 0)])
def test_trees_beside_chunks_give_the_golden_tokens(method: str, size: int, depth: int) -> None:
    """In float32, from captured steps; nothing is captured or allocated for them later."""
    from runtime.schedule.config import MixedSteps
    from runtime.schedule.plan import StepKind
    from runtime.schedule.speculation import Speculation
    from tests.gpu.test_drafters_gpu import asked
    from tests.runtime.engine.rig import run
    from tests.runtime.speculate.demo_acceptance import WIDEST, golden_rows

    width, buckets, requests = WIDEST[method] + 1, (128, 256, 512), asked()
    how: dict[str, Any] = {"widths": (1,), "speculation": Speculation(width, mixed_percent=100)}
    how |= {"mixed": MixedSteps(buckets), "prefill_buckets": buckets, "max_prefill_tokens": 512}
    beside = 0
    with rig_of(method, size, torch.float32, depth=depth, **how) as engine:
        launch = engine.executor.launch

        def counted(spec: Any) -> None:
            nonlocal beside
            beside += spec.plan.kind is StepKind.MIXED and spec.plan.row_tokens == size
            launch(spec)

        def arrive(engine: Any, turn: int) -> None:
            if 0 < turn < len(requests):
                engine.add(requests[turn])

        engine.executor.launch = counted
        finished = run(engine, requests[:1], arrive)
        engine.stop()
        counters = dict(engine.counters)
    assert [list(finished[i].token_ids) for i in range(len(finished))] == [row["token_ids"] for row in golden_rows()]
    assert beside > 3
    assert counters["graph_captures_after_warmup"] == counters["device_allocs_after_warmup"] == 0


@ENGINES
@pytest.mark.parametrize("method", ["dflash", "mtp"])
def test_a_round_is_one_captured_launch_without_a_sync(method: str) -> None:
    from tests.gpu.steady_steps import count_steady_steps
    from tests.runtime.engine.rig import request

    requests = [request(i, range(3 + i, 20 + i), max_tokens=100, stops=()) for i in range(8)]
    with rig_of(method, 32, torch.bfloat16, depth=2, block_size=64) as engine:
        count_steady_steps(engine, requests)
        assert engine.counters["chain_breaks{start}"] == 1
