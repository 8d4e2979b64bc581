"""What the host does in a turn of steady decode: agree, plan, stage, launch, land; by rows, and behind a long queue.

    python -m tests.runtime.engine.bench_host [--device cuda] [--rows 1 16 256 1024] [--waiting 0 10000]
    python -m tests.runtime.engine.bench_host --rows 1 32 --waiting 0 --width 4     # rounds of speculation, k = 3
    ... --layers 24     # a step longer than a turn, for which the host waits

Knows: the real engine over a model that is too small to matter. Does not know: what a real model costs the device.
Every block boundary falls into the measured steps, for all rows at once: that is the worst a queue of equals can do.
On a CPU the twin's streams are threads that share the interpreter with the loop, so figures are upper bounds there.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch

from models.ops.select import select_kernels
from runtime.engine import Engine
from runtime.execute.device.cpu_twin import open_device
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.runtime.engine.rig import VOCABULARY, request, rig, run
from tests.runtime.engine.turn_clock import WORK, Turn, TurnClock

PROMPT = 16
STEPS = 400
WARM_UP = 40
BLOCK = 64
HEAD_DIM_ON_GPU = 64


def steady_turns(device: str, rows: int, waiting: int, depth: int, width: int = 1, layers: int = 1) -> list[Turn]:
    """Turns in which ``rows`` requests decode, none begins or ends, and ``waiting`` more are queued.

    ``width``: W of each step; above 1 a script says how many of the guesses are kept, six tenths on average.
    ``layers``: of the model.
    """
    length = PROMPT + (STEPS + 2 * WARM_UP) * width
    speculation: dict[str, Any] = {}
    if width > 1:
        script = {"num_speculative_tokens": width - 1, "synthetic_acceptance_length": 1 + 0.6 * (width - 1)}
        proposer = proposer_for(speculative_config({"method": "synthetic", **script}))
        speculation = {"proposer": proposer, "speculation": Speculation(width)}
    opened = open_device(device)
    half = torch.bfloat16 if device != "cpu" else torch.float32
    kernels = None  # on a GPU such as need no compiler beside what is measured
    if device != "cpu":
        kernels = select_kernels(opened.torch_device, half, HEAD_DIM_ON_GPU, "triton")
    with rig(
        device=opened,
        dtype=half,
        kernels=kernels,
        depth=depth,
        rows=rows,
        blocks=rows * -(-(length + 8 * width) // BLOCK) + 1,
        block_size=BLOCK,
        max_model_len=length + 8 * width,
        max_prefill_tokens=max(1024, rows),
        prefill_burst=1 << 20,
        shape={
            "max_position_embeddings": 1024 * width,
            "head_dim": HEAD_DIM_ON_GPU if device != "cpu" else 16,
            "num_hidden_layers": layers,
        },
        prefix_caching=False,
        **speculation,
    ) as engine:
        clock = TurnClock(engine)
        prompts = [[(7 * i + j) % VOCABULARY for j in range(PROMPT)] for i in range(rows + waiting)]
        requests = [request(i, p, stops=(), max_tokens=length - PROMPT) for i, p in enumerate(prompts)]
        for late in requests[rows:]:
            engine.add(late)

        def end_when_measured(_: Engine, turn: int) -> None:
            if len(clock.steady) == STEPS + WARM_UP:  # nobody needs the rest
                for one in requests:
                    engine.cancel(one.request_id)

        # The running ones come first in line, though they are announced last.
        first = [replace(one, priority=-1) for one in requests[:rows]]
        run(engine, first, end_when_measured, clock.end_turn, most_turns=1 << 20)
    return clock.steady[WARM_UP + rows * PROMPT // 1024 :][: STEPS - WARM_UP]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 256, 1024])
    parser.add_argument("--waiting", nargs="+", type=int, default=[0, 10_000])
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--width", type=int, default=1, help="tokens a row that a round may gain")
    parser.add_argument("--layers", type=int, default=1, help="of the model: more make steps longer")
    args = parser.parse_args()
    device = "cuda:0" if args.device == "cuda" else args.device
    print("  rows  waiting  " + "".join(f"{phase:>9}" for phase in WORK) + "     busy p50      p99   turns/s   (us)")
    for rows in args.rows:
        for waiting in args.waiting:
            turns = steady_turns(device, rows, waiting, args.depth, args.width, args.layers)
            spent = [turn.spent for turn in turns]
            busy = sorted((one["turn"] - one["wait"]) / 1e3 for one in spent)
            medians = (statistics.median(one[phase] for one in spent) / 1e3 for phase in WORK)
            p50, p99 = statistics.median(busy), busy[int(len(busy) * 0.99)]
            print(
                f"{rows:6} {waiting:8}  " + "".join(f"{us:9.1f}" for us in medians),
                f"   {p50:9.1f} {p99:8.1f} {1e6 / p50:9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
