"""What the host does between a batch of prompts and the launch of their prefill steps.

    python -m tests.runtime.engine.bench_prefill_host [--device D] [--prompts 1 32 256] [--length 512] [--budget 8192]

Knows: the real engine, alone and with its control plane of one, over a model that is too small to matter.
Does not know: what a real model costs the device, or a plan of FlashInfer's attention the host.

The device stands still while the host works and moves on while the host waits for it, so that a CPU, whose device is
threads of this process, says what the host does beside a GPU (but for the copy to the device: its thread is woken).
Only what comes before the first launch delays the device; later steps are hidden where it needs longer for them.

    add     hand the requests over
    first   from the first ``add`` until the first prefill step was launched; before it, what the turns until then did
            (launch includes stage)
    step    exchange, plan and launch of each other prefill step, the median; before it, its parts
    last    from the moment when the last result was there until the engine had said what ended

Each figure is the least of all batches: where it is more, the host waited for other threads and processes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runtime.engine import Engine
from runtime.execute.device.cpu_twin import TwinDevice, open_device
from runtime.schedule.request import Request, SamplingParams
from tests.runtime.engine.rig import rig

VOCABULARY = 150_000  # small numbers are objects that Python shares; a prompt's are mostly not
BLOCK = 64
HORIZON = 2
PHASES = ("exchange", "plan", "stage", "launch")


@dataclass(frozen=True, slots=True)
class Prefills:
    """One batch: microseconds. ``phases``: of the turns up to the first launch; ``step_phases``: medians of a step."""

    add: float
    first: float
    step: float
    last: float
    phases: dict[str, float]
    step_phases: dict[str, float]


class Clock:
    """Times an engine's phases from outside, and lets a twin's device move only while the engine waits for it."""

    def __init__(self, engine: Engine) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.launched = 0
        self.taken = 0.0
        self._device = engine.executor.device
        for name, owner, method in (
            ("exchange", engine, "_submit_agreed_events"),
            ("plan", engine.scheduler, "plan"),
            ("stage", engine.executor.staging, "stage"),
            ("launch", engine, "_launch"),
        ):
            setattr(owner, method, self._timed(name, getattr(owner, method)))
        self.stand()
        engine.executor.take = self._waiting(engine.executor.take)  # type: ignore[method-assign]

    def stand(self) -> None:
        self._device.synchronize()
        if isinstance(self._device, TwinDevice):
            self._device.compute.pause()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            self.spent[name] += time.perf_counter() - began
            self.launched += name == "launch" and result is not None
            return result

        return timed

    def _waiting(self, take: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(plan: Any) -> Any:
            if isinstance(self._device, TwinDevice):
                self._device.compute.resume()
            result = take(plan)
            if isinstance(self._device, TwinDevice):
                self._device.compute.pause()
            self.taken = time.perf_counter()
            return result

        return waiting


def prefill(engine: Engine, clock: Clock, requests: list[Request]) -> Prefills:
    """Run ``requests``, of one token each, to their ends."""
    clock.spent.clear()
    first, steps, ended = 0.0, [], 0
    phases: dict[str, float] = {}
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    added = time.perf_counter()
    while ended < len(requests):
        before = sum(clock.spent[name] for name in ("exchange", "plan", "launch"))
        was, earlier = dict(clock.spent), clock.launched
        output = engine.step()
        done = time.perf_counter()
        ended += len(output.finished)
        if clock.launched == earlier:
            continue
        if not first:
            first, phases = done - began, dict(clock.spent)
        else:
            took = sum(clock.spent[name] for name in ("exchange", "plan", "launch")) - before
            steps.append((took, {name: clock.spent[name] - was.get(name, 0.0) for name in PHASES}))
    last = time.perf_counter() - clock.taken
    while engine.has_work:
        engine.step()
    step_phases = {name: statistics.median(one[name] for _, one in steps) if steps else 0.0 for name in PHASES}
    step = statistics.median(took for took, _ in steps) if steps else 0.0
    us = 1e6
    return Prefills(
        (added - began) * us,
        first * us,
        step * us,
        last * us,
        {name: phases[name] * us for name in PHASES},
        {name: value * us for name, value in step_phases.items()},
    )


def prefills(device: str, prompts: int, length: int, budget: int, repeats: int) -> list[Prefills]:
    """``repeats`` batches of ``prompts`` prompts of ``length`` tokens through one engine, after one to warm it."""
    opened = open_device(device)
    draw = random.Random(prompts)
    greedy = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
    token_ids = [tuple(draw.choices(range(100, VOCABULARY), k=length)) for _ in range(prompts)]
    found = []
    with rig(
        device=opened,
        dtype=torch.bfloat16 if device != "cpu" else torch.float32,
        rows=prompts,
        blocks=(prompts + 7) * -(-(length + 8) // BLOCK) + 9,
        block_size=BLOCK,
        max_model_len=4096,
        max_prefill_tokens=budget,
        horizon=HORIZON,
        prefill_burst=1 << 20,
        prefix_caching=False,
        shape={
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "hidden_size": 64,
            "head_dim": 64 if device != "cpu" else 16,
            "num_hidden_layers": 1,
        },
        frozen=True,
    ) as engine:
        clock = Clock(engine)
        for repeat in range(repeats + 1):
            numbers = range(repeat * prompts, (repeat + 1) * prompts)
            requests = [Request(i, ids, greedy) for i, ids in zip(numbers, token_ids, strict=True)]
            clock.stand()
            found.append(prefill(engine, clock, requests))
        if isinstance(opened, TwinDevice):
            opened.compute.resume()
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    device = "cuda:0" if args.device == "cuda" else args.device
    names = ("add", *PHASES, "first", *PHASES, "step", "last")
    print("prompts  " + "".join(f"{name:>9}" for name in names) + "   (us)")
    for prompts in args.prompts:
        found = prefills(device, prompts, args.length, args.budget, args.repeats)
        rows = [
            (one.add, *one.phases.values(), one.first, *one.step_phases.values(), one.step, one.last) for one in found
        ]
        columns = zip(*rows, strict=True)
        print(f"{prompts:7}  " + "".join(f"{min(column):9.0f}" for column in columns), flush=True)


if __name__ == "__main__":
    main()
