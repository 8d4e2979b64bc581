"""The decode graph in a bare loop: the least time that a chained step could take.

Knows: how rows are set up as after a prefill, and how replays are timed on the device.
Does not know: engines that run, what a graph holds. It is used when nothing is in flight and no request is left.
"""

from __future__ import annotations

import statistics

from launch.bench.session import Lengths
from launch.bench.trace import BenchError
from launch.bench.workload import greedy
from runtime.engine import Engine
from runtime.execute.launch_spec import LaunchSpec
from runtime.schedule.plan import SlotWrite, StepKind, StepPlan

WARM_UP_STEPS = 16  # decode steps after the prefill that are no steady chain yet


def warm_up_steps(steps: int) -> int:
    """How many of ``steps`` decode steps are left out at the start."""
    return min(WARM_UP_STEPS, steps // 4)


def replay_ms(engine: Engine, lengths: Lengths, batch: int, repeats: int) -> float:
    """Milliseconds a replay of the decode graph of ``batch`` live rows, over the lengths of the steady steps of a run:
    the median of ``repeats`` loops. Every rank calls it, when nothing is in flight and no request is left.

    The rows are set up as after a prefill, in blocks of their own; KV is random, so that the device works as hard.
    """
    executor = engine.executor
    plan = replay_plan(engine, lengths, batch)
    spec = replay_spec(engine, plan)
    graph = executor.decode.graphs.get(spec.bucket, spec.variant, spec.exchange_rows)
    steps = lengths.output - 1
    skipped = warm_up_steps(steps)
    compute, device = executor.device.compute, executor.device
    blocks = len(plan.block_writes)
    for layer in executor.pool.paged:
        compute.submit(lambda layer=layer: layer[:, 1 : 1 + blocks].normal_())  # type: ignore[misc]
    found = []
    for repeat in range(1 + repeats):  # the first one warms up
        staged = executor.staging.stage(spec)
        if staged is not None:
            executor.staging.apply(staged)
        for _ in range(skipped):
            graph.replay()
        began, ended = device.event(timing=True), device.event(timing=True)
        compute.record(began)
        for _ in range(steps - skipped):
            graph.replay()
        compute.record(ended)
        ended.synchronize()
        if repeat:
            found.append(began.elapsed_ms(ended) / (steps - skipped))
    return statistics.median(found)


def replay_spec(engine: Engine, plan: StepPlan) -> LaunchSpec:
    """As the executor would launch ``plan``, whose requests no scheduler knows; every group has such a plan."""
    agreed = engine.executor.needs(plan) if engine.config.data_parallel > 1 else None
    return engine.executor.resolve(plan, agreed)


def replay_plan(engine: Engine, lengths: Lengths, batch: int) -> StepPlan:
    """A decode step of ``batch`` rows that have just been prefilled, or of a group's share of them, rounded up.

    BenchError when the pool has too few blocks.
    """
    executor = engine.executor
    num_blocks = executor.pool.num_blocks
    groups = engine.config.data_parallel
    rows, each = -(-batch // groups), -(-lengths.total // engine.config.block_size)
    if rows * each > num_blocks:
        raise BenchError(f"batch {batch} needs {rows * each} KV blocks, the pool has {num_blocks}")
    slots = tuple(range(1, rows + 1))
    # Each row begins with another token, in each group: equal ones choose equal experts, and read as few of them.
    first = executor.group * rows
    return StepPlan(
        step=-1,
        kind=StepKind.DECODE,
        slots=slots,
        epochs=(0,) * rows,
        width=1,
        slot_writes=tuple(
            SlotWrite(
                slot=slot,
                epoch=0,
                request_id=-1,
                length=lengths.prompt,
                prompt_length=lengths.prompt,
                min_length=0,
                max_length=lengths.total + 1,
                token_ids=((first + slot) % executor.vocab_size,) * (lengths.prompt + 1),
                stop_token_ids=(),
                sampling=greedy(lengths.output),
            )
            for slot in slots
        ),
        block_writes=tuple((slot, i, 1 + (slot - 1) * each + i) for slot in slots for i in range(each)),
    )
