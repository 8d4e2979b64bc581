"""Ranks that open tiny engines one after the other, as users open them, and count what their own turns did.

Knows: what the ranks run, and what each may have done meanwhile. Does not know: how ranks meet (launch/), which jobs
are tried between how many ranks (test_engine_ranks_gpu.py). On a CPU only the device's part of the counts is missing.

All ranks stay for all jobs, and say on stdout where they are: starting a rank and compiling its kernels is most of
what a job takes on a new machine.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.ranks.process_group import joined
from launch.ranks.rendezvous import discover
from launch.ranks.start_engine import open_engine
from runtime.config import Device, EngineConfig
from runtime.engine import Engine
from runtime.schedule.plan import Finished
from runtime.schedule.request import Request
from tests.gpu.steady_steps import check_steady, counting, sum_of
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.test_engine_gpu import SHAPE
from tests.gpu.untyped import spawn
from tests.runtime.engine.rig import TINY, request, run
from tests.runtime.engine.test_depths import mixture
from tests.runtime.speculate.demo_acceptance import DEMO, WIDEST, golden_rows

SEED = 3
BLOCK, BLOCKS, LENGTH = 64, 400, 512
STEADY, STEADY_ROUNDS = 200, 60  # steps
STEADY_ROWS = 8
BEFORE_STEADY = 12  # turns in which all rows are prefilled, and the first results land
MOST_TURNS = 3000
GOLDEN = {"cuda": 27, "cpu": 4}  # of the demo model's prompts
PATIENCE_S = 60.0  # with the other ranks: a profiler's first start takes seconds

Found = dict[str, Any]  # what one rank found, as JSON


@dataclass(frozen=True, slots=True)
class Job:
    """One engine of all ranks. ``speculates``: the demo model and its MTP layer in float32, in place of a tiny random
    model; every step of decode rows is a round."""

    depth: int = 2
    symmetric: bool = True
    mixed_steps: bool = False
    speculates: bool = False

    @property
    def width(self) -> int:
        return WIDEST["mtp"] + 1 if self.speculates else 1

    def steady(self, device: Device) -> int:
        """Steps that are counted; on a CPU, where they are slow and less is counted, as few as meet a block's end."""
        if device == "cuda":
            return STEADY_ROUNDS if self.speculates else STEADY
        return BLOCK // self.width

    def batch(self, device: Device) -> list[Request]:
        """Of all kinds."""
        return mixture(SEED, 3 if self.speculates and device == "cpu" else 14)

    def config(self, place: Place) -> EngineConfig:
        """One decode bucket: bfloat16 products round by their number of rows, and depths differ in that, and in what
        a mixed step holds. No prefix is cached, so that a batch that comes again takes the same steps."""
        model: dict[str, Any] = {
            "model": str(place.folder / "model"),
            "load_format": "dummy",
            "dtype": "bfloat16" if place.device == "cuda" else "float32",
        }
        if self.speculates:
            guesses = {"method": "mtp", "model": str(DEMO / "mtp"), "num_speculative_tokens": WIDEST["mtp"]}
            model = {"model": str(DEMO), "dtype": "float32"}
            always = {"disable_by_batch_size": STEADY_ROWS, "mixed_step_percent": 100}
            model["speculative_config"] = guesses | always
        return EngineConfig(
            **model,
            device=place.device,
            tensor_parallel=place.ranks,
            max_num_seqs=STEADY_ROWS,
            decode_buckets=(STEADY_ROWS,),
            block_size=BLOCK,
            num_blocks=BLOCKS,
            max_model_len=LENGTH,
            max_prefill_tokens=64,
            prefix_caching=False,
            mixed_steps=self.mixed_steps,
            prefill_attention="triton",  # FlashInfer's is built anew on a new machine, which takes minutes
            chain_depth=self.depth,
            symmetric_all_reduce=self.symmetric,
            control_timeout_s=PATIENCE_S,
            bundles=str(place.folder / "bundles"),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks run. ``folder`` holds the model and gets a file of findings a rank."""

    folder: Path
    device: Device
    ranks: int
    port: int
    began: float = field(default_factory=time.time)

    def say(self, rank: int, what: str) -> None:
        print(f"rank {rank}, {time.time() - self.began:.1f} s: {what}", flush=True)


def all_ranks(folder: Path, device: Device, jobs: dict[str, Job], ranks: int) -> dict[str, list[Found]]:
    """By job what each rank found; a rank that fails or finds something wrong raises here."""
    (folder / "model").mkdir(parents=True)
    shape = {**TINY, **(SHAPE if device == "cuda" else {}), "max_position_embeddings": LENGTH}
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_rank, args=(Place(folder, device, ranks, port), jobs), nprocs=ranks)
    by_rank: list[Found] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    found = {name: [one[name] for one in by_rank] for name in jobs}
    for name, job in jobs.items():
        assert [one["rank"] for one in found[name]] == [*range(ranks)]
        for one in found[name]:
            check(one, job, device)
        for same in ("tokens", "golden", "accepted", "digest"):
            differing = [one["rank"] for one in found[name] if one[same] != found[name][0][same]]
            assert not differing, f"{name}: ranks {differing} differ from rank 0 in their {same}"
    return found


# ---- a rank ----


def _rank(rank: int, place: Place, jobs: dict[str, Job]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(place.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port)}
    torch.set_num_threads(1)
    rendezvous = discover(os.environ)
    found: dict[str, Found] = {}
    place.say(rank, "started")
    with joined(rendezvous, place.device):
        for name, job in jobs.items():
            place.say(rank, f"{name}: opening")
            with open_engine(job.config(place), rendezvous) as engine:
                place.say(rank, f"{name}: open, {engine.executor.device.captures} graphs captured")
                found[name] = {"rank": rank, **_live(engine, job, place)}
            place.say(rank, f"{name}: {found[name]['steady']} {found[name]['mixed']}")  # no test rewrites asserts here
            del engine
            _forget_engine(place.device)
    (place.folder / f"rank{rank}.json").write_text(json.dumps(found))
    for name, job in jobs.items():
        check(found[name], job, place.device)  # only now: a rank that left earlier would take the others with it


def _forget_engine(device: Device) -> None:
    """On all ranks, before the next one is sized."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    dist.all_reduce(torch.zeros(1))


def _live(engine: Engine, job: Job, place: Place) -> Found:
    """Some batches. All ranks take the same turns, since requests end at the same ones everywhere (law 1)."""
    rank = engine.control.rank
    first = _run(engine, job.batch(place.device))  # variants of sampling that are captured late are captured here
    found: Found = {"tokens": [[i, *ended.token_ids] for i, ended in sorted(first.items())]}
    golden = _run(engine, _golden_requests(place.device)) if job.speculates else {}
    found["golden"] = [[*ended.token_ids] for _, ended in sorted(golden.items())]
    found["accepted"] = [[i, ended.rounds, ended.accepted] for i, ended in sorted((first | golden).items())]

    place.say(rank, "steady steps")
    steps = job.steady(place.device)
    steady = _steady_requests(steps, job.width)
    _announce(engine, steady)
    for _ in range(BEFORE_STEADY):
        engine.step()
    with _counting(engine, found, "steady", place.device):
        for _ in range(steps):
            engine.step()
    for item in steady if engine.is_leader else ():
        engine.cancel(item.request_id)
    _take_turns_until_ended(engine, steady)

    place.say(rank, "steps of all kinds")
    with _counting(engine, found, "mixed", place.device):
        _run(engine, _renumbered(job.batch(place.device), 200))

    before = engine.counters["steps"]
    with no_synchronisation() if place.device == "cuda" else nullcontext():
        if engine.is_leader:
            run(engine, _renumbered(job.batch(place.device), 300))
            engine.stop()
        else:
            engine.follow()
    found["unsynchronised_steps"] = engine.counters["steps"] - before
    found["digest"] = engine.scheduler.digest.value
    return found


def _golden_requests(device: Device) -> list[Request]:
    """Greedy ones of the demo model, with ids of their own."""
    return [
        request(1000 + i, row["prompt_token_ids"], max_tokens=len(row["token_ids"]), stops=(0, 3))
        for i, row in enumerate(golden_rows()[: GOLDEN[device]])
    ]


def _steady_requests(steps: int, width: int) -> list[Request]:
    longest = (BEFORE_STEADY + steps + 10) * width
    return [request(100 + i, range(1, 9 + i), max_tokens=longest, stops=()) for i in range(STEADY_ROWS)]


def _renumbered(requests: list[Request], by: int) -> list[Request]:
    return [Request(by + r.request_id, r.prompt_token_ids, r.sampling, r.stop_token_ids) for r in requests]


def _announce(engine: Engine, requests: list[Request]) -> None:
    for item in requests if engine.is_leader else ():
        engine.add(item)


def _run(engine: Engine, requests: list[Request]) -> dict[int, Finished]:
    _announce(engine, requests)
    return _take_turns_until_ended(engine, requests)


def _take_turns_until_ended(engine: Engine, requests: list[Request]) -> dict[int, Finished]:
    awaited = {item.request_id for item in requests}
    finished: dict[int, Finished] = {}
    for _ in range(MOST_TURNS):
        finished |= {ended.request_id: ended for ended in engine.step().finished}
        if finished.keys() == awaited:
            return finished
    raise AssertionError(f"after {MOST_TURNS} turns {sorted(awaited - finished.keys())} have not ended")


@contextmanager
def _counting(engine: Engine, found: Found, name: str, device: Device) -> Iterator[None]:
    """What the engine counted inside, as ``grown``, and on a GPU how often what happened there, as ``names``."""
    with counting(engine, on_gpu=device == "cuda") as seen:
        yield
    wanted = ("cuda", "cuLaunchKernel", "Memcpy", "nccl", "_all_reduce_kernel")
    names = {event: count for event, count in sorted(seen.names.items()) if event.startswith(wanted)}
    found[name] = {"grown": seen.grown, "names": names, "windows": seen.windows}


# ---- what a rank must have found ----


def check(found: Found, job: Job, device: Device) -> None:
    """Raises AssertionError where a rank did more in its turns than it may."""
    steady, mixed, steps = found["steady"], found["mixed"], job.steady(device)
    grown = steady["grown"]
    assert (grown["decode_steps"], grown["prefill_steps"]) == (steps, 0), "the steps were not steady"
    boundaries = steps * job.width // BLOCK + 1
    assert grown["host_to_device_copies"] <= boundaries * STEADY_ROWS, "only block boundaries send anything"
    assert grown["device_allocs_after_warmup"] == 0
    assert mixed["grown"]["mixed_steps" if job.mixed_steps else "prefill_steps"] > 0
    assert mixed["grown"]["decode_steps"] > 0
    assert (mixed["windows"] > 0) is (job.mixed_steps and job.speculates)
    assert steady["grown"]["graph_captures_after_warmup"] == mixed["grown"]["graph_captures_after_warmup"] == 0
    assert found["unsynchronised_steps"] >= mixed["grown"]["steps"], "the last batch was not run"
    assert (sum(accepted for _, _, accepted in found["accepted"]) > 0) is job.speculates
    if device == "cuda":
        check_device(Counter(steady["names"]), grown, job.symmetric)
        launches = mixed["names"].get("cudaGraphLaunch", 0)
        grown = mixed["grown"]
        two = grown["prefill_steps"] + grown["mixed_steps"]
        assert launches == grown["steps"] + two + mixed["windows"], (
            "a decode step is one graph launch, one with chunks two, beside windows three"
        )


def check_device(names: Counter[str], grown: dict[str, int], symmetric: bool) -> None:
    """Of steady steps: what the profiler saw against what the engine counted."""
    check_steady(names, grown)
    through_nccl, in_one_kernel = sum_of(names, "ncclDevKernel"), names["_all_reduce_kernel"]
    assert (through_nccl == 0, in_one_kernel > 0) == (symmetric, symmetric), "sums or keys went another way than asked"
