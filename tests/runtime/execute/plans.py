"""Steps for tests of the device side, with everything a test does not care about filled in.

Knows: StepPlan and LaunchSpec. Does not know: the scheduler; these plans need not make sense as a sequence.
"""

from __future__ import annotations

from runtime.execute.launch_spec import LaunchSpec, StepShape
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.plan import Chunk, Fork, SlotUpdate, SlotWrite, StepKind, StepPlan
from runtime.schedule.request import SamplingParams


def decode_step(
    step: int,
    slots: tuple[int, ...],
    *,
    bucket: int | None = None,
    width: int = 1,
    logprobs: int | None = None,
    slot_writes: tuple[SlotWrite, ...] = (),
    block_writes: tuple[tuple[int, int, int], ...] = (),
    slot_updates: tuple[SlotUpdate, ...] = (),
) -> LaunchSpec:
    plan = StepPlan(
        step=step,
        kind=StepKind.DECODE,
        slots=slots,
        epochs=(1,) * len(slots),
        width=width,
        slot_writes=slot_writes,
        block_writes=block_writes,
        slot_updates=slot_updates,
    )
    variant = SamplingVariant(logprobs=logprobs is not None, top_logprobs=logprobs or 0)
    shape = StepShape("decode", bucket or len(slots), width, tokens=(bucket or len(slots)) * width, variant=variant)
    return LaunchSpec(plan, plan.kind, "decode", shape)


def prefill_step(
    step: int, chunks: tuple[Chunk, ...], *, forks: tuple[Fork, ...] = (), bucket: int | None = None
) -> LaunchSpec:
    plan = StepPlan(
        step=step,
        kind=StepKind.PREFILL,
        slots=tuple([chunk.slot for chunk in chunks] + [fork.slot for fork in forks]),
        epochs=(1,) * (len(chunks) + len(forks)),
        width=1,
        chunks=chunks,
        forks=forks,
    )
    shape = StepShape("prefill", bucket or len(plan.slots), tokens=max(plan.packed_tokens, len(plan.slots)))
    return LaunchSpec(plan, plan.kind, "prefill", shape)


def slot_write(
    slot: int,
    token_ids: tuple[int, ...] = (1, 2, 3),
    *,
    epoch: int = 1,
    prompt_length: int | None = None,
    stop_token_ids: tuple[int, ...] = (),
    sampling: SamplingParams | None = None,
) -> SlotWrite:
    return SlotWrite(
        slot=slot,
        epoch=epoch,
        request_id=100 + slot,
        length=0,
        prompt_length=len(token_ids) if prompt_length is None else prompt_length,
        min_length=len(token_ids),
        max_length=len(token_ids) + 16,
        token_ids=token_ids,
        stop_token_ids=stop_token_ids,
        sampling=sampling if sampling is not None else SamplingParams(temperature=0.0, seed=0),
    )
