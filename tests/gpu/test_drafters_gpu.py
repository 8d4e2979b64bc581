"""Proposers with weights on a GPU: the demo's drafters and hybrids' own MTP layers give the tokens of single steps,
captured and without a sync. A block's attention, and entries without queries, are what a reference makes of them.

In float32 they keep as many guesses as on a CPU, but for near-ties; in bfloat16 about as many.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.inputs import DecodeAttention
from models.kernels.interface import Rotation
from models.ops.select import select_kernels
from runtime.engine import Engine
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.proposer import MakeProposer
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.config import MixedSteps
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.gpu.steady_steps import count_steady_steps
from tests.gpu.test_engine_gpu import gpu_rig
from tests.gpu.test_gdn_gpu import shape
from tests.gpu.test_mamba_gpu import HYBRID as NEMOTRON
from tests.models.kernels.nvidia_kernels import nvidia_kernels
from tests.models.tiny_delta import FAMILIES
from tests.plant import reference_kernels
from tests.runtime.engine.rig import request, run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.speculate.demo_acceptance import DEMO, RECORD, WIDEST, acceptance, golden_rows

pytestmark = pytest.mark.gpu


def rig_of(method: str | None, dtype: torch.dtype, **more: Any) -> Any:
    proposer: MakeProposer | None = None
    widths = (1,)
    if method is not None:
        keys = {"method": method, "model": str(DEMO / method), "num_speculative_tokens": WIDEST[method]}
        proposer = proposer_for(speculative_config(keys))
        widths = (WIDEST[method] + 1,)
    kernels = select_kernels(torch.device("cuda:0"), dtype, 64, "triton")
    limits: dict[str, Any] = {"rows": 16, "blocks": 800, "max_model_len": 640, "max_prefill_tokens": 512}
    limits |= {"folder": DEMO, "dtype": dtype, "kernels": kernels, "widths": widths, "proposer": proposer}
    return gpu_rig("triton", **(limits | {"prefill_buckets": (128, 512)} | more))


def asked() -> list[Request]:
    return [
        request(i, row["prompt_token_ids"], max_tokens=len(row["token_ids"]), stops=(0, 3))
        for i, row in enumerate(golden_rows())
    ]


@pytest.mark.parametrize(
    ("rows", "block", "dtype"),
    [
        (1, 16, torch.bfloat16),
        (8, 16, torch.bfloat16),
        (32, 16, torch.bfloat16),  # from here on with a list of splits
        (32, 4, torch.bfloat16),  # by TMA, in two ways
        (160, 4, torch.bfloat16),
        (3, 5, torch.bfloat16),
        (8, 8, torch.float32),
        (8, 16, torch.float32),  # too many rows of queries for the kernel
    ],
)
def test_attention_of_blocks_is_the_references(rows: int, block: int, dtype: torch.dtype) -> None:
    """As 8B has it: each token sees the whole block. Lengths from a block alone to a full table; what nobody wrote is
    NaN. With a list and without."""
    torch.manual_seed(rows)
    heads, kv_heads, dim, page, pages = 32, 8, 128, 64, 20
    kernels = nvidia_kernels("cuda", prefill="triton")
    table = (1 + torch.randperm(rows * pages, device="cuda")).view(rows, pages).to(torch.int32)
    lengths = torch.randint(block, pages * page, (rows,), device="cuda", dtype=torch.int32)
    lengths[0], lengths[-1] = block, pages * page
    kv = torch.randn(2, 1 + rows * pages, page, kv_heads, dim, device="cuda").to(dtype)
    behind = torch.arange(pages * page, device="cuda") >= lengths[:, None]
    slots = table.long().repeat_interleave(page, 1) * page + torch.arange(pages * page, device="cuda") % page
    kv.flatten(1, 2)[:, slots[behind]] = float("nan")
    q = torch.randn(rows * block, heads, dim, device="cuda").to(dtype)
    inputs = DecodeAttention(table, lengths, block, pages * page, causal=False)
    expected = reference_kernels().decode_attention(q, kv, inputs, dim**-0.5).float()
    causal = reference_kernels().decode_attention(q, kv, replace(inputs, causal=True), dim**-0.5).float()
    most = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((causal - expected).norm() / expected.norm()) > 2 * most, "the mask matters"
    for planned in (inputs, kernels.plan_decode(inputs, heads, kv)):
        found = kernels.decode_attention(q, kv, planned, dim**-0.5)
        assert float((found.float() - expected).norm() / expected.norm()) < most


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_keys_and_values_alone_are_written_as_beside_queries(tokens: int) -> None:
    """What a drafter is shown, a token and a window, and a prompt."""
    torch.manual_seed(tokens)
    heads, kv_heads, dim = 32, 8, 128
    kernels = nvidia_kernels("cuda", prefill="triton")
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda").to(torch.bfloat16)
    q_norm, k_norm = (torch.randn(dim, device="cuda").to(torch.bfloat16) for _ in range(2))
    places = 64 + torch.randperm(tokens, device="cuda")
    turn = Rotation(q_norm, k_norm, 1e-6, torch.randn(400, dim, device="cuda"), places, places)
    beside, alone = (torch.zeros(2, 8, 64, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    kernels.rope_and_cache(qkv, heads, beside, turn)
    kernels.rope_and_cache(qkv[:, heads * dim :].contiguous(), 0, alone, turn)
    assert beside.count_nonzero() > 0
    assert torch.equal(alone, beside)
    alone.zero_()
    kernels.rope_and_cache(qkv[:, heads * dim :], 0, alone, turn)
    assert torch.equal(alone, beside), "columns of a wider tensor"


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("method", WIDEST)
def test_float32_gives_the_golden_tokens_and_keeps_as_many_guesses(method: str, depth: int) -> None:
    with rig_of(method, torch.float32, depth=depth) as engine:
        finished = run(engine, asked())
        engine.stop()
        found = acceptance(method, dict(engine.counters))
    assert [list(finished[i].token_ids) for i in range(len(finished))] == [row["token_ids"] for row in golden_rows()]
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))[method]
    assert found["accepted_by_position"] == pytest.approx(recorded["accepted_by_position"], abs=0.03)


@pytest.mark.parametrize("method", WIDEST)
def test_bfloat16_keeps_about_as_many_guesses(method: str) -> None:
    with rig_of(method, torch.bfloat16, depth=2) as engine:
        run(engine, asked())
        engine.stop()
        found = acceptance(method, dict(engine.counters))
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))[method]
    assert found["accepted_length"] == pytest.approx(recorded["accepted_length"], rel=0.1)


@pytest.mark.parametrize("method", WIDEST)
def test_a_round_is_one_captured_launch_without_a_sync(method: str) -> None:
    requests = [request(i, range(3 + i, 20 + i), max_tokens=100, stops=()) for i in range(8)]
    with rig_of(method, torch.bfloat16, depth=2, block_size=64) as engine:
        count_steady_steps(engine, requests)
        assert engine.counters["chain_breaks{start}"] == 1


SEVERAL = Speculation(  # 8 tokens for one or two rows, 4 for three or four, 2 for more
    8,
    costs=((2, 900), (16, 7900)),
    narrower=((4, ((2, 990), (4, 1000), (16, 7900))), (2, ((4, 1990), (16, 900)))),
)


@pytest.mark.parametrize("depth", [0, 2])
def test_windows_of_several_widths_give_the_golden_tokens(depth: int) -> None:
    """Rows leave one after the other, so windows grow; what was captured holds rounds of all widths."""
    with rig_of("dflash", torch.float32, depth=depth, widths=(1,), mixed=None, speculation=SEVERAL) as engine:
        finished = run(engine, asked())
        engine.stop()
        counters = dict(engine.counters)
    assert [list(finished[i].token_ids) for i in range(len(finished))] == [row["token_ids"] for row in golden_rows()]
    assert counters["speculation_narrowed{1}"] > 0 < counters["speculation_narrowed{3}"]
    assert counters["graph_captures_after_warmup"] == counters["device_allocs_after_warmup"] == 0
    assert sum(one.rounds for one in finished.values()) == counters["spec_num_drafts"]
    if depth:
        assert counters["chain_breaks{start}"] == 1


@pytest.mark.parametrize("depth", [0, 2])
def test_windows_of_several_widths_beside_chunks_give_the_golden_tokens(depth: int) -> None:
    """A prompt comes every third turn, so that chunks have few rows and many beside them."""
    several = replace(SEVERAL, mixed_percent=100)
    how: dict[str, Any] = {"widths": (1,), "mixed": MixedSteps((128, 256, 512)), "prefill_buckets": (128, 256, 512)}
    requests, beside = asked(), Counter[int]()
    with rig_of("dflash", torch.float32, depth=depth, speculation=several, **how) as engine:
        launch = engine.executor.launch

        def launched(spec: LaunchSpec) -> None:
            if spec.shape.proposing:
                beside[spec.shape.width] += 1
            launch(spec)

        def arrive(engine: Engine, turn: int) -> None:
            if turn and turn % 3 == 0 and turn // 3 < len(requests):
                engine.add(requests[turn // 3])

        engine.executor.launch = launched
        finished = run(engine, requests[:1], arrive)
        del vars(engine.executor)["launch"]
        engine.stop()
        counters = dict(engine.counters)
    assert [list(finished[i].token_ids) for i in range(len(finished))] == [row["token_ids"] for row in golden_rows()]
    assert set(beside) == {2, 4, 8}, beside
    assert counters["graph_captures_after_warmup"] == counters["device_allocs_after_warmup"] == 0
    if depth:
        assert counters["chain_breaks{start}"] == 1


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_a_round_of_fewer_tokens_is_one_captured_launch_without_a_sync(rows: int) -> None:
    requests = [request(i, range(3 + i, 20 + i), max_tokens=100, stops=()) for i in range(rows)]
    several: dict[str, Any] = {"widths": (1,), "mixed": None, "speculation": SEVERAL, "block_size": 64}
    with rig_of("dflash", torch.bfloat16, depth=2, **several) as engine:
        count_steady_steps(engine, requests)
        assert engine.counters["chain_breaks{start}"] == 1


def eagle3_head(folder: Path) -> MakeProposer:
    """Without weights, for the demo model; a draft vocabulary of 1,000 ids."""
    sizes = json.loads((DEMO / "mtp" / "config.json").read_text(encoding="utf-8"))
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 1000, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(sizes | own | layers), encoding="utf-8")
    keys = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    return proposer_for(speculative_config(keys), load_format="dummy")


@pytest.mark.parametrize("depth", [0, 2])
def test_an_eagle3_head_without_weights_leaves_the_golden_tokens(depth: int, tmp_path: Path) -> None:
    """Its guesses are bad, and nothing of them reaches a text."""
    with rig_of("mtp", torch.float32, depth=depth, proposer=eagle3_head(tmp_path)) as engine:
        finished = run(engine, asked())
        engine.stop()
        assert engine.counters["spec_num_drafts"] > 0
        assert engine.counters["graph_captures_after_warmup"] == 0
    assert [list(finished[i].token_ids) for i in range(len(finished))] == [row["token_ids"] for row in golden_rows()]


def test_a_round_with_an_eagle3_head_is_one_captured_launch_without_a_sync(tmp_path: Path) -> None:
    requests = [request(i, range(3 + i, 20 + i), max_tokens=100, stops=()) for i in range(8)]
    how: dict[str, Any] = {"proposer": eagle3_head(tmp_path), "block_size": 64}
    with rig_of("mtp", torch.bfloat16, depth=2, **how) as engine:
        count_steady_steps(engine, requests)
        assert engine.counters["chain_breaks{start}"] == 1


def own_layer(family: str, dtype: torch.dtype, depth: int = 2, **more: Any) -> Any:
    """A hybrid and its own MTP layer, k = 3; both with dummy weights."""
    keys = {"method": "mtp", "num_speculative_tokens": 3}
    proposer = proposer_for(speculative_config(keys), load_format="dummy")
    model = NEMOTRON if family == "nemotron-h" else shape(family)
    has_layer = {**model, "num_nextn_predict_layers": 1}
    return gpu_rig("triton", depth=depth, dtype=dtype, shape=has_layer, widths=(4,), proposer=proposer, **more)


@pytest.mark.parametrize("family", [*FAMILIES, "nemotron-h"])
def test_a_hybrids_own_layer_gives_the_same_tokens_at_every_depth(family: str) -> None:
    """In float32, over windows of 4 tokens; one near-tie may fall the other way, as in test_gdn_gpu.py."""
    requests, found = mixture(3), []
    for depth in (0, 2):
        with own_layer(family, torch.float32, depth) as engine:
            found.append(outcome(run(engine, requests)))
            assert engine.counters["spec_num_drafts"] > 0
    assert sum(found[1][i] != found[0][i] for i in found[0]) <= 1


@pytest.mark.parametrize("family", [*FAMILIES, "nemotron-h"])
def test_a_round_with_a_hybrids_own_layer_is_one_launch_without_a_sync(family: str) -> None:
    requests = [request(i, range(3 + i, 20 + i), max_tokens=60, stops=()) for i in range(8)]
    with own_layer(family, torch.bfloat16, block_size=64) as engine:
        count_steady_steps(engine, requests)


def drawn_guesses(method: str) -> MakeProposer:
    keys = {"method": method, "model": str(DEMO / method), "num_speculative_tokens": WIDEST[method]}
    return proposer_for(speculative_config({**keys, "draft_sample_method": "probabilistic"}))


@pytest.mark.parametrize("method", WIDEST)
def test_a_round_of_drawn_guesses_is_one_captured_launch_without_a_sync(method: str) -> None:
    draws: dict[str, Any] = {"max_tokens": 100, "stops": (), "temperature": 0.8, "top_k": 50, "top_p": 0.95}
    requests = [request(i, range(3 + i, 20 + i), **draws) for i in range(8)]
    kinds = SamplingVariant(), SamplingVariant.covering([one.sampling for one in requests])
    how: dict[str, Any] = {"proposer": drawn_guesses(method), "variants": kinds, "block_size": 64}
    with rig_of(method, torch.bfloat16, depth=2, **how) as engine:
        count_steady_steps(engine, requests)
        assert engine.counters["chain_breaks{start}"] == 1


@pytest.mark.parametrize("method", WIDEST)
def test_drawn_guesses_give_the_same_tokens_at_every_depth(method: str) -> None:
    """draft_sample_method probabilistic over captured steps, with filters; a rank alone."""
    requests = [
        request(i, range(3 + i, 20 + i), max_tokens=60, stops=(), temperature=0.8, top_k=50, top_p=0.95)
        for i in range(6)
    ]
    answers = []
    for depth in (0, 2):
        with rig_of(method, torch.float32, depth=depth, proposer=drawn_guesses(method)) as engine:
            finished = run(engine, requests)
            engine.stop()
            assert engine.counters["spec_num_accepted_tokens"] > 0
        answers.append({i: list(one.token_ids) for i, one in finished.items()})
    assert sum(answers[0][i] != answers[1][i] for i in answers[0]) <= 1, "near-ties apart"


@pytest.mark.parametrize("method", WIDEST)
def test_drawn_guesses_beside_chunks_give_the_tokens_of_rounds_without(method: str) -> None:
    """Rows that decode have a window in every step, so rounds begin at the same places. Nothing is captured or
    allocated later."""
    draws: dict[str, Any] = {"max_tokens": 60, "stops": (), "temperature": 0.8, "top_k": 50, "top_p": 0.95}
    requests = [request(i, range(3 + i, 60 + 40 * i), **draws) for i in range(6)]
    width, buckets = WIDEST[method] + 1, (128, 256, 512)
    kinds = SamplingVariant(), SamplingVariant.covering([one.sampling for one in requests])
    how: dict[str, Any] = {"proposer": drawn_guesses(method), "variants": kinds, "prefill_buckets": buckets}
    with rig_of(method, torch.float32, depth=0, **how) as engine:
        apart = outcome(run(engine, requests))
    how |= {"widths": (1,), "speculation": Speculation(width, mixed_percent=100), "mixed": MixedSteps(buckets)}
    with rig_of(method, torch.float32, depth=2, **how) as engine:

        def arrive(engine: Engine, turn: int) -> None:
            if 0 < turn < len(requests):
                engine.add(requests[turn])

        beside = outcome(run(engine, requests[:1], arrive))
        engine.stop()
        counters = dict(engine.counters)
    assert sum(beside[i] != apart[i] for i in apart) <= 1, "near-ties apart"
    assert counters["mixed_steps"] > 3
    assert not [name for name in counters if name.startswith("speculation_off")]
    assert counters["graph_captures_after_warmup"] == counters["device_allocs_after_warmup"] == 0
