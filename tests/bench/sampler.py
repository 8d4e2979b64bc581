"""What sampling costs on one GPU: microseconds of a captured sample-and-check.

    python3 -m tests.bench.sampler              # filters: whole rows, and a rank's half of them; launches of a draw
    python3 -m tests.bench.sampler --variants   # every variant by batch: Triton and torch, and the memory they allocate

Logits are [B, 151936]. Filters: medians of ROUNDS turns of REPLAYS replays each. "half" is what one of two ranks does
for the same rows: its half of the vocabulary, and the merge of both halves, without the all-gather between. Variants:
means of 50 replays; MiB is what it allocates at most.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.execute.sampling import logit_edits, logprobs, penalties, sampler
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.kernels import triton_kernels
from runtime.execute.sampling.logprobs import token_logprobs
from runtime.execute.sampling.penalties import SeenTokens
from runtime.execute.sampling.sampler import local_share, merge_shares, sample_and_check
from runtime.schedule.request import SamplingParams
from tests.gpu.untyped import Event, Stream
from tests.runtime.execute.sampling.sampling_cases import rows_for

VOCAB = 151_936
ROUNDS, REPLAYS = 5, 20
FILTERS = {
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "all three": SamplingParams(top_k=50, top_p=0.9, min_p=0.05),
}
BATCHES = (1, 8, 32, 64, 128, 256)
VARIANTS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(top_p=0.9),
    "top-k, top-p, min-p": SamplingParams(top_k=50, top_p=0.9, min_p=0.02),
    "penalties, top-p": SamplingParams(top_p=0.9, repetition_penalty=1.1, min_tokens=4),
    "5 log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
}
FEATURES = SamplingVariant(random=True, filters=True)
Work = Callable[[], Any]


def logits_like(kind: str, batch: int) -> Tensor:
    """float32 [batch, VOCAB]. Of "wide" 6,600 tokens hold 0.9 of the mass, of "flat" 93,000, of "model" a few."""
    logits = torch.randn(batch, VOCAB, device="cuda")
    if kind == "wide":
        return logits.mul_(3)
    if kind == "model":
        likely = torch.randint(0, VOCAB, (batch, 2000), device="cuda")
        raised = torch.empty(batch, 2000, device="cuda").exponential_(0.4).add_(4)
        return logits.mul_(2).scatter_add_(1, likely, raised)
    if kind == "bimodal":
        return logits.mul_(0.7).add_(torch.rand(batch, VOCAB, device="cuda").lt_(0.05), alpha=5)
    return logits


def _rows(params: SamplingParams, batch: int) -> SamplingInputs:
    return rows_for([params] * batch, range(9, 9 + batch), stop_ids=[[1, 2]] * batch, device="cuda")


def _whole(logits: Tensor, rows: SamplingInputs) -> Tensor:
    return sample_and_check(logits, rows, FEATURES)[0].token_B


def _half(logits: Tensor, rows: SamplingInputs) -> Tensor:
    """Of one rank of two, merged as if the other rank's were the same."""
    share_BX = local_share(logits[:, : VOCAB // 2], 0, rows, FEATURES)
    return merge_shares(torch.cat((share_BX, share_BX), 1), rows, FEATURES)[0].token_B


def _captured(work: Work) -> Any:
    """A graph of ``work``, which has run twice before."""
    stream = Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    return graph


def _replays_us(graph: Any, replays: int) -> float:
    """Microseconds a replay."""
    start, end = (Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / replays


def in_turns(*works: Work) -> list[float]:
    """Medians of each one's microseconds, all of them timed once a round."""
    graphs = [_captured(work) for work in works]
    turns = [[_replays_us(graph, REPLAYS) for graph in graphs] for _ in range(ROUNDS)]
    return [statistics.median(turn) for turn in zip(*turns, strict=True)]


def launches(work: Work) -> int:
    """Kernels and memory operations that one run puts on the device."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())  # type: ignore[attr-defined]


def filters() -> None:
    """One line a kind of logits, batch and filter."""
    print(f"{'logits':14} {'filter':10} {'rows':>4} {'us':>9} {'half us':>9}", flush=True)
    cases = [("wide", torch.bfloat16, batch, name) for batch in BATCHES for name in FILTERS]
    cases += [("wide", torch.float32, BATCHES[-1], name) for name in FILTERS]
    cases += [
        (k, torch.bfloat16, BATCHES[-1], n) for k in ("model", "flat", "bimodal") for n in ("top-p 0.9", "all three")
    ]
    for kind, dtype, batch, name in cases:
        torch.manual_seed(batch)
        logits, rows = logits_like(kind, batch).to(dtype), _rows(FILTERS[name], batch)
        works = (_whole, _half) if FILTERS[name].top_k else (_whole,)
        times = in_turns(*(partial(work, logits, rows) for work in works))
        label = f"{kind} {'fp32' if dtype == torch.float32 else 'bf16'}"
        print(f"{label:14} {name:10} {batch:4} {''.join(f'{us:10.1f}' for us in times)}", flush=True)
    logits, rows = logits_like("wide", 8), _rows(FILTERS["all three"], 8)
    counted = [launches(partial(work, logits, rows)) for work in (_whole, _half)]
    print("launches a draw: {}, of a half and the merge {}".format(*counted))


def variants() -> None:
    """One line a variant, batch and implementation."""
    for name, params in VARIANTS.items():
        features = SamplingVariant.covering([params])
        for batch in (1, 32, 256):
            logits = torch.randn(batch, VOCAB, device="cuda").mul_(3).bfloat16()
            rows = _rows(params, batch)
            counts = torch.zeros(batch, VOCAB, dtype=torch.int16, device="cuda")
            if features.penalties:
                rows = replace(rows, processors=(SeenTokens(counts, counts > 0),))

            def work() -> None:
                draw, _ = sample_and_check(logits, rows, features)  # noqa: B023 (used within the iteration)
                if features.logprobs:  # noqa: B023
                    token_logprobs(logits, draw.token_B, features.top_logprobs)  # noqa: B023

            for kind, kernels in (("triton", triton_kernels()), ("torch", None)):
                for module in (sampler, logprobs, logit_edits, penalties):
                    setattr(module, "kernels_for", lambda tensor, kernels=kernels: kernels)  # noqa: B010
                work()
                torch.cuda.reset_peak_memory_stats()
                allocated = torch.cuda.memory_allocated()
                work()
                peak = (torch.cuda.max_memory_allocated() - allocated) / 2**20
                took = _replays_us(_captured(work), 50)
                print(f"{name:20} B {batch:3} {kind:6} {took:10.1f} us {peak:8.1f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="every variant, Triton and torch")
    variants() if parser.parse_args().variants else filters()


if __name__ == "__main__":
    main()
