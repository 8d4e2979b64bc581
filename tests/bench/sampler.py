"""What sampling costs on one GPU: microseconds of a captured sample-and-check by variant and batch, Triton and torch.

Run on one GPU:  python3 -m tests.bench.sampler
Logits are bfloat16 [B, 151936]; every figure is the mean of 50 graph replays; "peak" is what it allocates, in MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runtime.execute.sampling import logprobs, sampler
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.kernels import triton_kernels
from runtime.execute.sampling.logprobs import token_logprobs
from runtime.execute.sampling.penalties import SeenTokens
from runtime.execute.sampling.sampler import sample_and_check
from runtime.schedule.request import SamplingParams
from tests.gpu.untyped import Event, Stream
from tests.runtime.execute.sampling.sampling_cases import rows_for

VOCAB = 151_936
REPLAYS = 50
VARIANTS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(top_p=0.9),
    "top-k, top-p, min-p": SamplingParams(top_k=50, top_p=0.9, min_p=0.02),
    "penalties, top-p": SamplingParams(top_p=0.9, repetition_penalty=1.1, min_tokens=4),
    "5 log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
}


def _time(work: Callable[[], Any]) -> tuple[float, float]:
    """(microseconds a replay, MiB allocated by one run)."""
    stream = Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        start, end = (Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / REPLAYS, peak


def main() -> None:
    """Print one line a variant, batch and implementation."""
    for name, params in VARIANTS.items():
        features = SamplingVariant.covering([params])
        for batch in (1, 32, 256):
            logits = torch.randn(batch, VOCAB, device="cuda").mul_(3).bfloat16()
            rows = rows_for([params] * batch, [9] * batch, stop_ids=[[1, 2]] * batch, device="cuda")
            counts = torch.zeros(batch, VOCAB, dtype=torch.int16, device="cuda")
            seen = SeenTokens(counts, counts > 0)

            def work() -> None:
                draw, _ = sample_and_check(logits, rows, features, seen)  # noqa: B023 (used within the iteration)
                if features.logprobs:  # noqa: B023
                    token_logprobs(logits, draw.token_B, features.top_logprobs)  # noqa: B023

            for kind, kernels in (("triton", triton_kernels()), ("torch", None)):
                for module in (sampler, logprobs):
                    setattr(module, "kernels_for", lambda tensor, kernels=kernels: kernels)  # noqa: B010
                microseconds, peak = _time(work)
                print(f"{name:20} B {batch:3} {kind:6} {microseconds:10.1f} us {peak:8.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
