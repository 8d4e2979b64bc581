"""Prompt log-probabilities on a GPU: no step waits for them, every depth reports the same, vocabulary pieces included.

The same tiny model as test_engine_gpu.py, in bfloat16; values are compared with a float32 forward on the CPU.
"""

from __future__ import annotations

import pytest

from runtime.execute.sampling.logprobs import PIECE
from runtime.schedule.request import Request
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.test_engine_gpu import SHAPE, gpu_rig
from tests.runtime.engine.prompt_ranks import Scores, prompts
from tests.runtime.engine.rig import VOCABULARY, RigLimits, request, rig, run

pytestmark = pytest.mark.gpu
CLOSE = 0.3  # nats; bfloat16 activations against float32


def long_prompt() -> Request:
    """More tokens than one piece of logits has rows."""
    return request(7, [i * i % VOCABULARY for i in range(PIECE + 40)], max_tokens=2, prompt_logprobs=5)


def test_values_are_those_of_float32() -> None:
    limits: RigLimits = {"max_model_len": 512, "max_prefill_tokens": 2 * PIECE, "blocks": 400, "block_size": 16}
    limits["shape"] = SHAPE | {"max_position_embeddings": 512}
    on_gpu, on_cpu = Scores(), Scores()
    with gpu_rig(**limits) as engine:
        run(engine, [long_prompt()], watch=on_gpu)
    with rig(**limits) as engine:
        run(engine, [long_prompt()], watch=on_cpu)
    found, expected = on_gpu.by_request[7], on_cpu.by_request[7]
    assert found.keys() == expected.keys()
    worst = max(abs(found[position][0] - expected[position][0]) for position in found)
    print(f"largest difference of a log-probability over {len(found)} tokens: {worst:.4f}")
    assert worst < CLOSE


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_depths_agree(depth: int) -> None:
    for one in [*prompts(), long_prompt()]:
        by_depth = []
        for used in (0, depth):
            scores = Scores()
            with gpu_rig(depth=used, max_model_len=512, shape=SHAPE | {"max_position_embeddings": 512}) as engine:
                run(engine, [one], watch=scores)
            by_depth.append(scores.by_request)
        assert by_depth[0] == by_depth[1]


def test_no_step_synchronises() -> None:
    requests = [r for r in prompts() if r.sampling.prompt_logprobs is not None]
    again = [Request(100 + r.request_id, r.prompt_token_ids, r.sampling, r.stop_token_ids) for r in requests]
    with gpu_rig(depth=2, max_prefill_tokens=24) as engine:
        run(engine, requests)  # kernels are compiled and the side channel is allocated here
        scores = Scores()
        with no_synchronisation():
            run(engine, again, watch=scores)
    assert scores.by_request
