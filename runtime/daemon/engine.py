"""What the daemon needs of an engine: the verbs of sessions.

Knows: names; runtime/engine.py says what they promise. Does not know: how an engine keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from runtime.config import EngineConfig
from runtime.frontend.engine_protocol import ModelFacts
from runtime.schedule.request import FinishReason, Request


class SessionEngine(Protocol):
    """What the desk needs of an engine: the verbs of runtime/engine.py."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_config(self) -> ModelFacts: ...
    @property
    def counters(self) -> Mapping[str, int | float]: ...
    def reset_prefix_cache(self) -> None: ...
    def start(self, request: Request, quantum: int, *, keep: bool = False) -> None: ...
    def proceed(self, request_id: int, epoch: int, tokens: int) -> None: ...
    def extend(
        self, request_id: int, epoch: int, token_ids: tuple[int, ...], max_tokens: int, quantum: int
    ) -> None: ...
    def fork(self, request_id: int, parent: int, *, scored: bool = False) -> None: ...
    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None: ...
