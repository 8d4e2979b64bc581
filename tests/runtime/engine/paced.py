"""A whole engine whose device only takes its time: `paced_engine(config, decode_ms=5.0)`.

Knows: how long a step takes, one behind the other, and when each row has had its last token. Does not know: models,
tensors. Scheduler, loop and control plane are the real ones, so that what an arrival waits for is what it waits for on
a GPU; a host without one can measure that, for nothing here needs a core while a step "runs".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import cast

from parallel.control.interface import ControlPlane, SingleRankControl
from runtime.config import EngineConfig
from runtime.engine import Engine, ServedModel
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import LaunchSpec, StepShape
from runtime.plan_late import PlanLate
from runtime.schedule.config import MixedSteps, SchedulerConfig
from runtime.schedule.plan import StepPlan, StepResult
from runtime.schedule.request import FinishReason
from runtime.schedule.scheduler import Scheduler

_PAD = 64  # tokens of a step with chunks are filled up to a multiple
_FIRST_ID = 5


@dataclass
class _Row:
    """What a slot holds: tokens so far, and how many there will be."""

    length: int
    most: int


@dataclass
class PacedExecutor:
    """Steps of ``decode_ms``, and ``token_ms`` more for each token of a chunk. ``busy_ms``, ``idle_ms``: of the device,
    from its first step on; ``gaps`` how often it had nothing to run although the step before it was no more than
    ``decode_ms`` ago.
    """

    decode_ms: float
    token_ms: float
    landed_at: float = 0.0
    idle_ms: float = 0.0
    gaps: int = 0
    _ends: dict[int, float] = field(default_factory=dict)
    _results: dict[int, StepResult] = field(default_factory=dict)
    _rows: dict[int, _Row] = field(default_factory=dict)
    _latest: float = 0.0

    def resolve(self, plan: StepPlan, *_: object) -> LaunchSpec:
        tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        padded = -(-tokens // _PAD) * _PAD
        role, rows = "prefill" if tokens else "decode", len(plan.slots)
        return LaunchSpec(plan, plan.kind, role, StepShape(role, rows, tokens=padded or rows), padded)

    def launch(self, spec: LaunchSpec) -> None:
        now = time.perf_counter()
        if self._latest and now > self._latest and now - self._latest < self.decode_ms / 1e3:
            self.gaps += 1
            self.idle_ms += (now - self._latest) * 1e3
        self._latest = max(now, self._latest) + (self.decode_ms + self.token_ms * spec.captured) / 1e3
        self._ends[spec.plan.step] = self._latest
        self._results[spec.plan.step] = self._run(spec.plan)

    def take(self, spec: LaunchSpec) -> StepResult:
        self.landed_at = end = self._ends.pop(spec.plan.step)
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return self._results.pop(spec.plan.step)

    def _run(self, plan: StepPlan) -> StepResult:
        for write in plan.slot_writes:
            self._rows[write.slot] = _Row(write.length, write.max_length)
        whole = {chunk.slot: chunk.last for chunk in plan.chunks}
        for chunk in plan.chunks:
            self._rows[chunk.slot].length = chunk.start + len(chunk.token_ids)
        tokens, counts, finish = [], [], []
        for slot in plan.slots:
            row = self._rows[slot]
            gains = whole.get(slot, True) and row.length < row.most
            row.length += gains
            tokens.append(_FIRST_ID + row.length % 100)
            counts.append(int(gains))
            finish.append(FinishReason.LENGTH if gains and row.length >= row.most else FinishReason.NONE)
        return StepResult(plan.step, tokens, counts, finish)

    def close(self) -> None:
        pass


class PacedEngine(Engine):
    """With the counters that its parts have."""

    @property
    def counters(self) -> Mapping[str, int | float]:
        counted = self.scheduler.counters
        paced = cast(PacedExecutor, self.executor)
        steps = counted.prefill_steps + counted.decode_steps + counted.mixed_steps
        return {
            "steps": steps,
            "chained_steps": counted.chained_steps,
            "ghost_rows": counted.ghost_rows,
            "prefix_hit_tokens": counted.prefix_hit_tokens,
            **asdict(self._late_counters),
            "device_gaps": paced.gaps,
            "device_idle_ms": paced.idle_ms,
            **{f"chain_breaks{{{why}}}": count for why, count in counted.chain_breaks.items()},
        }


def paced_engine(
    config: EngineConfig, *, decode_ms: float, token_ms: float = 0.0, control: ControlPlane | None = None
) -> PacedEngine:
    """``config.chain_depth`` and the other limits count; the model folder is not read."""
    limits = config.step_limits(4096, 2)
    blocks = limits.rows * -(-limits.max_model_len // limits.block_size)
    schedule = SchedulerConfig(limits=limits, blocks=blocks, prefix_caching=False, mixed=MixedSteps(long_prompt=2048))
    model = ServedModel(4096, limits.max_model_len, (2,))
    executor = cast(Executor, PacedExecutor(decode_ms, token_ms))
    config = replace(config, chain_depth=limits.depth)
    late = PlanLate(limits.depth) if config.plan_late else None
    return PacedEngine(config, model, Scheduler(schedule), executor, control or SingleRankControl(), late=late)
