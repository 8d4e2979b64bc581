"""Two ranks of a tiny engine, opened as users open it, each of which counts what its own turns did and checks that.

Knows: what the ranks run, and what each may have done meanwhile. Does not know: how ranks meet (launch/), which layouts
and depths are tried (test_engine_two_gpus.py). On a CPU only the device's part of the counts is missing.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launch.ranks.process_group import joined
from launch.ranks.rendezvous import discover
from launch.ranks.start_engine import open_engine
from runtime.config import Device, EngineConfig
from runtime.engine import Engine
from runtime.schedule.plan import Finished
from runtime.schedule.request import Request
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.test_engine_gpu import SHAPE
from tests.gpu.untyped import spawn
from tests.runtime.engine.rig import TINY, request, run
from tests.runtime.engine.test_depths import mixture

RANKS = 2
SEED = 3
BLOCK, BLOCKS, LENGTH = 64, 400, 512
STEADY = 200  # steps
STEADY_ROWS = 8
BEFORE_STEADY = 30  # turns in which all rows are prefilled, and the first results land
MOST_TURNS = 3000
COUNTED = (
    "steps",
    "prefill_steps",
    "decode_steps",
    "mixed_steps",
    "host_to_device_copies",
    "graph_captures_after_warmup",
    "device_allocs_after_warmup",
)

Found = dict[str, Any]  # what one rank found, as JSON


@dataclass(frozen=True, slots=True)
class Job:
    """What both ranks are told. ``folder`` holds the model and gets a file of findings a rank."""

    folder: Path
    device: Device
    depth: int = 2
    symmetric: bool = True
    mixed_steps: bool = False
    port: int = 0

    @property
    def steady(self) -> int:
        """Steps that are counted; on a CPU, where they are slow and less is counted, as few as meet a block's end."""
        return STEADY if self.device == "cuda" else BLOCK

    def config(self) -> EngineConfig:
        """One decode bucket: bfloat16 products round by their number of rows, and depths differ in that, and in what
        a mixed step holds. No prefix is cached, so that a batch that comes again takes the same steps."""
        return EngineConfig(
            model=str(self.folder / "model"),
            load_format="dummy",
            dtype="bfloat16" if self.device == "cuda" else "float32",
            device=self.device,
            tensor_parallel=RANKS,
            max_num_seqs=8,
            decode_buckets=(8,),
            block_size=BLOCK,
            num_blocks=BLOCKS,
            max_model_len=LENGTH,
            max_prefill_tokens=64,
            prefix_caching=False,
            mixed_steps=self.mixed_steps,
            prefill_attention="flashinfer",  # named, so that jobs which are compared run the same kernel
            chain_depth=self.depth,
            symmetric_all_reduce=self.symmetric,
            control_timeout_s=60.0,  # a profiler's first start takes seconds, and the other rank waits for it
            bundles=str(self.folder / "bundles"),
        )


def both_ranks(
    folder: Path, device: Device, *, depth: int = 2, symmetric: bool = True, mixed_steps: bool = False
) -> list[Found]:
    """What each rank found, by rank; a rank that fails or finds something wrong raises here."""
    (folder / "model").mkdir(parents=True)
    shape = {**TINY, **(SHAPE if device == "cuda" else {}), "max_position_embeddings": LENGTH}
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = Job(folder, device, depth, symmetric, mixed_steps, port)
    spawn(_rank, args=(job,), nprocs=RANKS)
    found: list[Found] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    assert [one["rank"] for one in found] == [*range(RANKS)]
    for one in found:
        check(one, job)
    for same in ("tokens", "digest"):
        assert found[0][same] == found[1][same], f"the ranks differ in their {same}"
    return found


# ---- a rank ----


def _rank(rank: int, job: Job) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    torch.set_num_threads(1)
    rendezvous = discover(os.environ)
    with joined(rendezvous, job.device), open_engine(job.config(), rendezvous) as engine:
        found = {"rank": rank, **_live(engine, job)}
    (job.folder / f"rank{rank}.json").write_text(json.dumps(found))
    print({name: found[name] for name in ("rank", "steady", "mixed")}, flush=True)  # no test rewrites asserts here
    check(found, job)  # only now: a rank that left earlier would take the other with it


def _live(engine: Engine, job: Job) -> Found:
    """Three batches. Both ranks take the same turns, since requests end at the same ones everywhere (law 1)."""
    first = _run(engine, mixture(SEED))  # variants of sampling that are captured late are captured here
    found: Found = {"tokens": [[i, *ended.token_ids] for i, ended in sorted(first.items())]}

    steady = _steady_requests(job.steady)
    _announce(engine, steady)
    for _ in range(BEFORE_STEADY):
        engine.step()
    with _counting(engine, found, "steady"):
        for _ in range(job.steady):
            engine.step()
    _take_turns_until_ended(engine, steady)

    with _counting(engine, found, "mixed"):
        _run(engine, _renumbered(mixture(SEED), 200))

    before = engine.counters["steps"]
    with no_synchronisation() if job.device == "cuda" else nullcontext():
        if engine.is_leader:
            run(engine, _renumbered(mixture(SEED), 300))
            engine.stop()
        else:
            engine.follow()
    found["unsynchronised_steps"] = engine.counters["steps"] - before
    found["digest"] = engine.scheduler.digest.value
    return found


def _steady_requests(steps: int) -> list[Request]:
    longest = BEFORE_STEADY + steps + 20
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
def _counting(engine: Engine, found: Found, name: str) -> Iterator[None]:
    """What the engine counted inside, as ``grown``, and on a GPU how often what happened there, as ``names``."""
    before = engine.counters
    if engine.config.device == "cuda":
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            yield
        names = Counter(event.name for event in profile.events())
    else:
        yield
        names = Counter()
    wanted = ("cuda", "Memcpy", "nccl", "_all_reduce_kernel")
    found[name] = {
        "grown": {counter: engine.counters[counter] - before[counter] for counter in COUNTED},
        "names": {event: count for event, count in sorted(names.items()) if event.startswith(wanted)},
    }


# ---- what a rank must have found ----


def check(found: Found, job: Job) -> None:
    """Raises AssertionError where a rank did more in its turns than it may."""
    steady, mixed = found["steady"], found["mixed"]
    grown = steady["grown"]
    assert (grown["decode_steps"], grown["prefill_steps"]) == (job.steady, 0), "the steps were not steady"
    assert grown["host_to_device_copies"] <= (job.steady // BLOCK + 1) * STEADY_ROWS, (
        "only block boundaries send anything"
    )
    assert grown["device_allocs_after_warmup"] == 0
    assert mixed["grown"]["mixed_steps" if job.mixed_steps else "prefill_steps"] > 0
    assert mixed["grown"]["decode_steps"] > 0
    assert steady["grown"]["graph_captures_after_warmup"] == mixed["grown"]["graph_captures_after_warmup"] == 0
    assert found["unsynchronised_steps"] >= mixed["grown"]["steps"], "the last batch was not run"
    if job.device == "cuda":
        check_device(Counter(steady["names"]), grown, job.symmetric)
        launches = mixed["names"].get("cudaGraphLaunch", 0)
        grown = mixed["grown"]
        two = grown["prefill_steps"] + grown["mixed_steps"]
        assert launches == grown["steps"] + two, "a decode step is one graph launch, one with chunks two"


def check_device(names: Counter[str], grown: dict[str, int], symmetric: bool) -> None:
    """Of steady steps: what the profiler saw against what the engine counted."""
    assert names["cudaGraphLaunch"] == grown["steps"]
    assert names["Memcpy HtoD (Pinned -> Device)"] == sum_of(names, "Memcpy HtoD") == grown["host_to_device_copies"]
    assert sum_of(names, "Memcpy DtoH") <= grown["steps"] + 3
    assert not names["cudaStreamSynchronize"]
    assert names["cudaDeviceSynchronize"] <= 2, "the profiler waits for the device when it stops, steps never do"
    assert not sum_of(names, "cudaMalloc")
    assert not sum_of(names, "cudaStreamBeginCapture")
    through_nccl, in_one_kernel = sum_of(names, "ncclDevKernel_AllReduce"), names["_all_reduce_kernel"]
    assert (through_nccl == 0, in_one_kernel > 0) == (symmetric, symmetric), "sums went another way than asked for"


def sum_of(names: Counter[str], prefix: str) -> int:
    return sum(count for name, count in names.items() if name.startswith(prefix))
