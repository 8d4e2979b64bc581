"""The engine on a GPU: depths agree token for token, a steady step is one launch without a sync, poison stays put.

The model is tiny and random, in bfloat16, with head_dim 128 so that the Hopper kernels serve every part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import pytest
import torch

from models.kernels.interface import PrefillWanted
from models.ops.select import select_kernels
from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.execute.device.cuda import CudaDevice
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.request import Request
from tests.gpu.steady_steps import check_steady, counting, shown
from tests.gpu.test_device_gpu import no_synchronisation
from tests.runtime.engine.rig import RigLimits, request, rig, run, tiny_folder
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_forks import families
from tests.runtime.engine.test_mixed import last_layer_for_draws
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks

SHAPE: dict[str, object] = {
    "hidden_size": 256,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
}
EVERYTHING = SamplingVariant(random=True, filters=True, penalties=True, min_tokens=True, logprobs=True, top_logprobs=3)

PREFILLS: tuple[PrefillWanted, ...] = ("flashinfer", "triton")

pytestmark = pytest.mark.gpu


@contextmanager
def gpu_rig(prefill: PrefillWanted = "flashinfer", **more: Unpack[RigLimits]) -> Iterator[Engine]:
    """``prefill`` is named, so that rigs which are compared run the same kernel, whatever is built meanwhile."""
    device = CudaDevice(torch.device("cuda:0"))
    limits: RigLimits = {
        "block_size": 16,
        "dtype": torch.bfloat16,
        "shape": SHAPE,
        "device": device,
        "prefill_buckets": (16, 32, 48, 64),
        **more,
    }
    limits.setdefault("kernels", select_kernels(device.torch_device, limits["dtype"], 128, prefill))
    with rig(**limits) as engine:
        assert engine.executor.prefill_attention == prefill
        yield engine


@pytest.mark.parametrize("buckets", [(16, 32, 48, 64), ()], ids=["graphs", "kernels"])
@pytest.mark.parametrize("seed", range(3))
def test_depths_agree(seed: int, buckets: tuple[int, ...]) -> None:
    """Law 9, exactly, which is promised in float32."""
    requests, exact = mixture(seed), torch.float32
    with gpu_rig("triton", depth=0, dtype=exact, prefill_buckets=buckets) as engine:
        serial = outcome(run(engine, requests))
    for depth in (1, 2, 4):
        with gpu_rig("triton", depth=depth, dtype=exact, prefill_buckets=buckets) as engine:
            assert outcome(run(engine, requests)) == serial
            assert engine.counters["chain_breaks{start}"] == 1


@pytest.mark.parametrize("prefill", PREFILLS)
def test_the_last_layer_for_draws_alone(prefill: PrefillWanted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of all tokens, queries and attention of those that draw: the same tokens, but for near-ties."""
    requests = mixture(5)
    with gpu_rig(prefill, depth=0) as engine:
        whole = outcome(run(engine, requests))
    taken = last_layer_for_draws(monkeypatch)
    with gpu_rig(prefill, depth=0) as engine:
        drawing = outcome(run(engine, requests))
    assert any(taken)
    assert sum(drawing[i] != whole[i] for i in whole) <= 3


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("seed", range(3))
def test_depths_agree_but_for_near_ties_in_bfloat16(seed: int, prefill: PrefillWanted) -> None:
    """Prefix hits and chunks differ by depth, and with them the last bits: of 14 requests one or two draw otherwise."""
    requests = mixture(seed)
    with gpu_rig(prefill, depth=0) as engine:
        serial = outcome(run(engine, requests))
    with gpu_rig(prefill, depth=2) as engine:
        deep = outcome(run(engine, requests))
        assert engine.counters["chain_breaks{start}"] == 1
    assert sum(deep[i] != serial[i] for i in serial) <= 3


def test_a_prefill_step_is_one_launch_and_a_few() -> None:
    """However many layers: what follows the replay is the sampling of the first tokens."""
    launches = {}
    for layers in (2, 12):
        with gpu_rig(depth=2, shape=SHAPE | {"num_hidden_layers": layers}) as engine:
            run(engine, [request(0, range(40), max_tokens=2)])
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
                acc_events=True,
            ) as profile:
                run(engine, [request(1, range(50, 90), max_tokens=1)])
            names = Counter(event.name for event in profile.events())
            launches[layers] = sum(count for name, count in names.items() if "LaunchKernel" in name)
            assert names["cudaGraphLaunch"] >= 1
    assert launches[2] == launches[12] <= 60


def test_eviction_changes_no_token_of_the_serial_engine() -> None:
    requests = [request(i, range(i, i + 40), max_tokens=60, stops=(), temperature=0.9 * (i % 2)) for i in range(6)]
    with gpu_rig(depth=0, blocks=24) as engine:
        serial = run(engine, requests)
    with gpu_rig(depth=2, blocks=24) as engine:
        deep = run(engine, requests)
        assert engine.counters["evictions"] > 0
    assert deep.keys() == serial.keys()
    assert all(len(deep[i].token_ids) == 60 for i in deep)


@pytest.mark.parametrize("buckets", [(16, 32, 48, 64), ()], ids=["graphs", "kernels"])
@pytest.mark.parametrize("prefill", PREFILLS)
def test_no_step_synchronises(prefill: PrefillWanted, buckets: tuple[int, ...]) -> None:
    """Prefill and decode of every variant, with graphs captured before: any hidden sync raises."""
    requests = mixture(3)
    variants = SamplingVariant(), EVERYTHING
    with gpu_rig(prefill, depth=2, prefill_buckets=buckets, variants=variants, prefix_caching=False) as engine:
        warm = run(engine, requests)  # lazily captured variants are captured here
        again = [Request(100 + r.request_id, r.prompt_token_ids, r.sampling, r.stop_token_ids) for r in requests]
        captured = engine.counters["graph_captures_after_warmup"]
        with no_synchronisation():
            finished = run(engine, again)
        assert engine.counters["graph_captures_after_warmup"] == captured
        assert len(finished) == len(warm)


@pytest.mark.parametrize("buckets", [(16, 32, 48, 64), ()], ids=["graphs", "kernels"])
@pytest.mark.parametrize("depth", [0, 2])
def test_forked_answers_are_those_of_single_requests(depth: int, buckets: tuple[int, ...]) -> None:
    """Exactly, in float32: prompts that end within a block and at its end, chunks, every kind of sampling."""
    requests, exact = families(), torch.float32
    single = [answer for one in requests for answer in one.answers()]
    with gpu_rig("triton", depth=0, rows=24, dtype=exact, prefill_buckets=buckets, prefix_caching=False) as engine:
        alone = outcome(run(engine, single))
        assert engine.counters["forks"] == 0
    with gpu_rig("triton", depth=depth, rows=24, dtype=exact, prefill_buckets=buckets) as engine:
        assert outcome(run(engine, requests)) == alone
        assert engine.counters["forks"] == len(single) - len(requests)
        assert engine.counters["prefill_tokens"] == sum(len(one.prompt_token_ids) for one in requests)


@pytest.mark.parametrize("prefill", PREFILLS)
def test_a_fork_synchronises_captures_and_allocates_nothing(prefill: PrefillWanted) -> None:
    """The last block of 40 tokens is copied in one launch, for all answers and layers; 48 are whole blocks."""
    with gpu_rig(prefill, depth=2, rows=8, variants=(SamplingVariant(random=True),), prefix_caching=False) as engine:
        for length, copies in ((40, 1), (48, 0)):
            prompts = [range(first, first + length) for first in (1, 100)]
            warm, again = (request(9 * i, p, n=8, temperature=1.0, stops=()) for i, p in enumerate(prompts))
            run(engine, [warm])
            before = dict(engine.counters)
            with no_synchronisation():
                finished = run(engine, [again])
            counters = engine.counters
            assert len(finished) == 8
            assert counters["prefill_tokens"] - before["prefill_tokens"] == length
            for name in ("graph_captures_after_warmup", "device_allocs_after_warmup"):
                assert counters[name] == before[name]
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
                run(engine, [request(20, range(50, 50 + length), n=8, temperature=1.0, stops=())])
            assert Counter(event.name for event in profile.events())["_copy_kernel"] == copies


def test_a_steady_step_is_one_launch() -> None:
    """200 steady steps: one graph launch each, no copy home; no sync, no allocation, no byte sent."""
    steps = 200
    with gpu_rig(depth=2, max_model_len=512, block_size=64, blocks=400) as engine:
        for i in range(8):
            engine.add(request(i, range(1, 9 + i), max_tokens=450, stops=()))
        for _ in range(20):
            engine.step()
        with counting(engine) as seen:
            for _ in range(steps):
                engine.step()
    print(shown(seen.names))
    assert seen.grown["decode_steps"] == seen.grown["steps"] == steps
    assert seen.grown["host_to_device_copies"] <= steps // 64 * 8 + 8, "only block boundaries send anything"
    check_steady(seen.names, seen.grown)


def test_engines_one_after_the_other_have_the_same_memory(tmp_path: Path) -> None:
    """Each sized to more than half of the device, the first still referred to while the second is sized."""
    folder = tiny_folder(tmp_path)
    blocks = []
    for _ in range(2):
        config = EngineConfig(
            model=str(folder), load_format="dummy", device="cuda", max_num_seqs=2, max_model_len=64, memory_fraction=0.7
        )
        with build_engine(
            config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cuda:0"
        ) as engine:
            run(engine, [request(0, (3, 4, 5))])
            blocks.append(engine.executor.sizing.num_blocks)
    assert blocks[1] == pytest.approx(blocks[0], rel=0.02)


def test_poisoned_blocks_change_nothing() -> None:
    requests = mixture(11)
    with gpu_rig(depth=2) as engine:
        clean = run(engine, requests)
    with gpu_rig(depth=2) as engine:
        poisoned = run(engine, requests, lambda e, turn: fill_with_nan(e, idle_blocks(e)))
    assert outcome(poisoned) == outcome(clean)
