"""A roomy SchedulerConfig, and others made from one by naming what differs, wherever the field lies.

Knows: which fields are those of StepLimits. Does not know: what a test wants to see.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypedDict, Unpack, cast

from runtime.schedule.config import MixedSteps, SchedulerConfig, SessionPolicy, SnapshotPolicy, StepLimits
from runtime.schedule.speculation import Speculation

ROOMY = SchedulerConfig(
    StepLimits(rows=4, slots=8, block_size=4, max_model_len=64, max_prefill_tokens=64),
    blocks=64,
)
_OF_LIMITS = {field.name for field in fields(StepLimits)}


class Limits(TypedDict, total=False):
    """Fields of SchedulerConfig and of its StepLimits. The width of those is the largest of ``widths``."""

    rows: int
    slots: int
    blocks: int
    block_size: int
    max_model_len: int
    depth: int
    widths: tuple[int, ...]
    max_prefill_tokens: int
    tree: int
    prefill_burst: int
    prefix_caching: bool
    max_waiting: int
    mixed: MixedSteps | None
    max_sessions: int
    session_policy: SessionPolicy
    snapshots: SnapshotPolicy | None
    windows: tuple[tuple[int, int], ...]
    speculation: Speculation | None


def config_with(base: SchedulerConfig = ROOMY, **given: Unpack[Limits]) -> SchedulerConfig:
    """``base`` with other values for some fields."""
    changed = cast(dict[str, Any], given)
    limits = {name: changed[name] for name in changed.keys() & _OF_LIMITS}
    if "widths" in changed:
        limits["width"] = max(changed["widths"], default=1)
    rest = {name: value for name, value in changed.items() if name not in _OF_LIMITS}
    return replace(base, limits=replace(base.limits, **limits), **rest)
