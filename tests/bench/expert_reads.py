"""Experts that decode steps really read, layer by layer, and the floor of a step with them.

    python3 -m tests.bench.expert_reads --model qwen3.5-35b-a3b --rows 1,8,32,128,256 [--steps 8]
    python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.bench.expert_reads --model ...

Random weights choose experts that crowd, so that a floor which assumes uniform choices (launch/bench/roofline.py) is
too high for them. Here each layer counts the tokens of its experts (models/expert_load.py), the counts are read behind
every step at depth 0, and what two of them differ by is one step's.

Knows: how to read one step's choices, and what they are worth. Does not know: what a step takes (`bench latency`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence

from launch.bench.options import H200_BYTES_PER_S, H200_FLOP_PER_S
from launch.bench.roofline import Ceilings, Shape, experts_of_the_fullest_rank, target_floor
from launch.bench.session import model_folder
from launch.ranks.process_group import joined
from launch.ranks.rendezvous import discover
from launch.ranks.start_engine import open_engine
from models.expert_load import read_load
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.schedule.request import Request, SamplingParams

Counts = Mapping[int, Sequence[int]]  # layer -> tokens of each of its experts


def read_by_step(engine: Engine, rows: int, prompt: int, steps: int) -> list[Counts]:
    """What each of ``steps`` decode steps of ``rows`` rows added to the counts. The engine's depth is 0."""
    vocabulary, model = engine.model_config.vocab_size, engine.executor._model
    for number in range(rows):
        ids = tuple((number * 7919 + place * 104729) % vocabulary for place in range(prompt))
        engine.add(Request(number, ids, SamplingParams(temperature=0.0, seed=number, max_tokens=steps + 99)))
    found: list[Counts] = []
    before, decodes = read_load(model).tokens, engine.counters["decode_steps"]
    while len(found) < steps:
        output, after = engine.step(), read_load(model).tokens
        if engine.counters["decode_steps"] > decodes and len(output.request_ids) == rows:
            found.append({n: [a - b for a, b in zip(after[n], before[n], strict=True)] for n in after})
        before, decodes = after, engine.counters["decode_steps"]
    for number in range(rows):
        engine.cancel(number)
    while engine.has_work:
        engine.step()
    return found


def distinct(counts: Counts, ranks: int) -> tuple[float, float]:
    """(experts of a layer that some token chose, those of the rank with most of them), means over layers. Ranks hold
    as many experts each, in order."""
    all_of_them, fullest = [], []
    for tokens in counts.values():
        here = len(tokens) // ranks
        by_rank = [sum(count > 0 for count in tokens[rank * here : (rank + 1) * here]) for rank in range(ranks)]
        all_of_them.append(sum(by_rank))
        fullest.append(max(by_rank))
    return statistics.mean(all_of_them), statistics.mean(fullest)


def line(shape: Shape, rows: int, length: float, ranks: int, read: Sequence[Counts]) -> str:
    """Of a Markdown table: what was read, what uniform choices would read, and the floors of both."""
    device = Ceilings(ranks=ranks, value_bytes=2, bytes_per_s=H200_BYTES_PER_S, flop_per_s=H200_FLOP_PER_S)
    every, fullest = (statistics.mean(figures) for figures in zip(*(distinct(one, ranks) for one in read), strict=True))
    uniform = experts_of_the_fullest_rank(shape, rows, ranks)
    floors = [target_floor(shape, device, batch=rows, length=length, active=active) for active in (fullest, uniform)]
    counted, assumed = (f"{floor.seconds * 1e3:.3f}" for floor in floors)
    return f"| {rows} | {every:.1f} of {shape.experts} | {fullest:.1f} | {uniform:.1f} | {counted} | {assumed} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shape that comes with Lockstride, or a folder")
    parser.add_argument("--rows", default="1,8,32,128,256", help="rows that decode together [1,8,32,128,256]")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt [64]")
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are looked at [8]")
    parser.add_argument("--length", type=float, default=1152, help="tokens of KV a row, for the floors [1152]")
    parser.add_argument("--device", default="cuda", help="cuda or cpu [cuda]")
    given = parser.parse_args()
    rows, rendezvous = [int(part) for part in given.rows.split(",")], discover(os.environ)
    ranks, folder = rendezvous.topology.world, model_folder(given.model)
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device=given.device,
        tensor_parallel=ranks,
        expert_parallel=ranks > 1,
        expert_load=os.devnull,  # what is counted is read here, step by step
        chain_depth=0,
        max_num_seqs=max(rows),
        max_model_len=given.prompt + given.steps + 200,
        decode_buckets=tuple(rows),
        prefix_caching=False,
        prefill_attention="triton" if given.device == "cuda" else "auto",
    )
    with joined(rendezvous, given.device), open_engine(config, rendezvous) as engine:
        if not rendezvous.topology.is_leader:
            engine.follow()
            return 0
        print("| rows | experts read | on the fullest rank | if uniform | floor, ms | if uniform |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: |")
        for count in rows:
            read = read_by_step(engine, count, given.prompt, given.steps)
            print(line(Shape.from_folder(folder), count, given.length, ranks, read), flush=True)
        engine.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
