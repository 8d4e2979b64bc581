"""Engines over tiny models on the CPU twin or a GPU, and a loop that runs requests to their end.

A rig is one rank: the same Engine class that torchrun starts, with a control plane of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from models.dummy import DummyTensor
from models.fp8_load import quantised_at_load
from models.ops.select import select_kernels
from models.registry import config_from_dict, config_from_folder
from models.weights import load_model
from parallel.comm.collectives import Collectives, SingleRank
from parallel.control.interface import ControlPlane, SingleRankControl
from parallel.layers.experts import ExpertSplit
from runtime.config import EngineConfig
from runtime.engine import Engine, ServedModel
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.device.protocol import Device
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import exchange_buckets
from runtime.execute.proposer import MakeProposer
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.step.memory import ExecutorConfig, MakeRole
from runtime.gc_freeze import freeze_heap
from runtime.grammar import Grammars
from runtime.groups.load_balancer import LoadBalancer
from runtime.groups.request_router import RequestRouter
from runtime.groups.step_sync import DpStepSync, StepAgreement
from runtime.observe.observer import Ranges, StepObserver, around
from runtime.plan_late import PlanLate
from runtime.schedule.config import MixedSteps, SchedulerConfig, SessionPolicy, SnapshotPolicy, StepLimits
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.speculation import Speculation
from tests.plant import Kernels
from tests.runtime.execute.sampling.sampling_fields import SamplingFields

VOCABULARY = 211
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


MIXED = MixedSteps(long_prompt=30)  # whatever fits rides along; tiny prompts of more than 30 tokens are long ones


def tiny_folder(folder: Path) -> Path:
    """A model folder with a config and no weights, for load_format dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


class RigLimits(TypedDict, total=False):
    """What a rig may be told, but for its place among others; for functions that pass it on."""

    depth: int
    rows: int
    blocks: int
    block_size: int
    max_model_len: int
    max_prefill_tokens: int
    prefix_caching: bool
    device: Device | None
    dtype: torch.dtype
    kv_dtype: torch.dtype | None
    quantization: str | None
    shape: Mapping[str, object] | None
    kernels: Kernels | None
    buckets: tuple[int, ...] | None
    prefill_buckets: tuple[int, ...]
    prefill_burst: int
    mixed: MixedSteps | None
    variants: tuple[SamplingVariant, ...]
    observe: StepObserver | None
    ranges: Ranges | None
    frozen: bool
    widths: tuple[int, ...]
    further_roles: Sequence[MakeRole]
    max_sessions: int
    session_policy: SessionPolicy
    proposer: MakeProposer | None
    speculation: Speculation | None
    folder: Path | None
    snapshots: SnapshotPolicy | None
    tree: int
    late: PlanLate | None
    grammars: Grammars | None


class RigPlace(TypedDict, total=False):
    """What a rig is told of the others, where it is one of several."""

    horizon: int
    collectives: Collectives | None
    experts: ExpertSplit | None
    groups: StepAgreement | None
    control: ControlPlane | None
    assignment: LoadBalancer | None


_values, _made = DummyTensor._values, dict[Any, torch.Tensor]()


def _values_once(tensor: DummyTensor, ranges: tuple[slice, ...]) -> torch.Tensor:
    """Engines of a process over one model read the same values."""
    key = tensor._key, tensor._centre, tensor._rows, *((one.start, one.stop) for one in ranges)
    if (made := _made.get(key)) is None:
        made = _values(tensor, ranges)
        if made.device.type == "cpu" and made.numel() < 1 << 16:
            _made[key] = made
    return made


DummyTensor._values = _values_once  # type: ignore[method-assign,assignment]


@contextmanager
def rig(
    *,
    depth: int = 2,
    rows: int = 8,
    blocks: int = 200,
    block_size: int = 8,
    max_model_len: int = 128,
    max_prefill_tokens: int = 64,
    horizon: int = 0,
    prefix_caching: bool = True,
    device: Device | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    quantization: str | None = None,
    shape: Mapping[str, object] | None = None,
    collectives: Collectives | None = None,
    experts: ExpertSplit | None = None,
    groups: StepAgreement | None = None,
    control: ControlPlane | None = None,
    assignment: LoadBalancer | None = None,
    kernels: Kernels | None = None,
    buckets: tuple[int, ...] | None = None,
    prefill_buckets: tuple[int, ...] = (),
    prefill_burst: int = 4,
    mixed: MixedSteps | None = MIXED,
    variants: tuple[SamplingVariant, ...] = (SamplingVariant(),),
    observe: StepObserver | None = None,
    ranges: Ranges | None = None,
    frozen: bool = False,
    widths: tuple[int, ...] = (1,),
    further_roles: Sequence[MakeRole] = (),
    max_sessions: int = 0,
    session_policy: SessionPolicy = "evict",
    proposer: MakeProposer | None = None,
    speculation: Speculation | None = None,
    folder: Path | None = None,
    snapshots: SnapshotPolicy | None = None,
    tree: int = 0,
    late: PlanLate | None = None,
    grammars: Grammars | None = None,
) -> Iterator[Engine]:
    """An engine over the tiny model. One decode bucket unless told otherwise: a product's last bits depend on its row
    count, except with exact kernels. ``groups``: it is one of several groups, whose exchange is in ``experts``; with an
    ``assignment``, requests that rank 0 of ``control`` announces are dealt out to all of them. ``frozen``: with the
    heap frozen, as build.py has it; it takes a full collection, too long for every rig of the tests. ``widths``: W of
    decode steps, in turn; ``further_roles`` serve those that are not 1. ``proposer`` and ``speculation``: as build.py
    has them, both or neither. ``quantization``: as EngineConfig has it. ``snapshots``: of a model with state in slots.
    ``folder``: a model with weights in place of the tiny one. ``tree``: tokens of trees, of which a row gains a path as
    long as the width.
    ``late``: how turns are put off, where a front end does so.
    """
    torch.set_num_threads(1)
    if widths != (1,):  # where prefill and decode take turns
        mixed = None
    config = EngineConfig(
        model="tiny",
        load_format="dummy",
        device="cpu",
        max_num_seqs=rows,
        block_size=block_size,
        max_prefill_tokens=max_prefill_tokens,
        chain_depth=depth,
        decode_buckets=buckets or (rows,),
        prefix_caching=prefix_caching,
        prefill_burst=prefill_burst,
        max_sessions=max_sessions,
    )
    model_config = config_from_folder(folder) if folder else config_from_dict({**TINY, **(shape or {})})
    model_config = quantised_at_load(model_config, quantization)
    device = device or TwinDevice()
    model = load_model(
        model_config,
        folder,
        load_format="safetensors" if folder else "dummy",
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device.torch_device,
        collectives=collectives or SingleRank(),
        experts=experts,
        kernels=kernels or select_kernels(device.torch_device, dtype, model_config.head_dim),
    )
    widest = max(widths) if speculation is None else speculation.width
    wide = speculation is not None and not prefill_buckets  # captured steps hold windows beside chunks as it is
    beside = 0 if mixed is None else rows * ((tree or widest) if wide else 1)
    slots = 2 * rows + max_sessions
    limits = StepLimits(rows, slots, block_size, max_model_len, depth, widest, max_prefill_tokens, tree)
    windows = speculation is None or speculation.most_rows != 0
    executor = Executor(
        device,
        model,
        ExecutorConfig(
            limits=limits,
            decode_buckets=config.decode_buckets,
            memory_fraction=0.9,
            num_blocks=blocks,
            agree_min=int,
            warm_variants=variants,
            exchanges=()
            if groups is None
            else exchange_buckets(config.decode_buckets, max_prefill_tokens, beside, tree or widest),
            prefill_buckets=prefill_buckets,
            mixed=mixed is not None,
            mixed_windows=windows and speculation is not None and (speculation.mixed_percent > 0 or groups is not None),
            windows=windows,
            narrower=() if speculation is None else tuple(width for width, _ in speculation.narrower),
            snapshots=0 if snapshots is None else snapshots.count,
        ),
        further_roles=further_roles,
        proposer=proposer,
        grammars=grammars,
        on_timing=observe.on_timing if observe is not None and observe.timed else None,
        stage_range=around(ranges, "stage"),
        land_range=partial(around, ranges),
        part_range=partial(around, ranges),
    )
    scheduler = Scheduler(
        SchedulerConfig(
            limits=limits,
            blocks=blocks,
            widths=widths,
            prefill_burst=prefill_burst,
            prefix_caching=prefix_caching and executor.restores_prefixes,
            mixed=mixed,
            max_sessions=max_sessions,
            session_policy=session_policy,
            speculation=speculation,
            snapshots=snapshots,
            windows=executor.sizing.windows,
        )
    )
    served = ServedModel(model_config.vocab_size, max_model_len, model_config.eos_token_ids, executor.widest)
    control = control or SingleRankControl(horizon)
    shared = None if groups is None else DpStepSync(groups, assignment)
    router = None if assignment is None else RequestRouter(control, assignment)
    thaw = freeze_heap() if frozen else None
    engine = Engine(
        config, served, scheduler, executor, control, observe, groups=shared, router=router, thaw=thaw, late=late
    )
    try:
        yield engine
        engine.stop()
        scheduler.check()
    finally:
        engine.close()


def request(
    request_id: int, prompt: Iterable[int], *, stops: tuple[int, ...] = (2,), **sampling: Unpack[SamplingFields]
) -> Request:
    """Greedy unless told otherwise; the seed is the id."""
    params: SamplingFields = {"temperature": 0.0, "max_tokens": 8, "seed": request_id, **sampling}
    return Request(request_id, tuple(prompt), SamplingParams(**params), stops)


def run(
    engine: Engine,
    requests: Iterable[Request],
    act: Callable[[Engine, int], None] | None = None,
    watch: Callable[[StepOutput], None] | None = None,
    most_turns: int = 3000,
) -> dict[int, Finished]:
    """Add all requests, take turns until nothing is left; ``act(engine, turn)`` is called before each turn."""
    finished: dict[int, Finished] = {}
    for item in requests:
        engine.add(item)
    turn = 0
    while engine.has_work or turn == 0:
        if act is not None:
            act(engine, turn)
        output = engine.step()
        if watch is not None:
            watch(output)
        for ended in output.finished:
            assert ended.request_id not in finished, "a request ends once"
            finished[ended.request_id] = ended
        turn += 1
        assert turn < most_turns, "the engine does not come to an end"
    return finished
