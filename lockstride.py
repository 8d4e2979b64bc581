"""Lockstride's public face: what a program that uses it imports.

Knows: the names. Does not know: anything else; `python -m launch` is the way in for people.

    from lockstride import EngineConfig, SamplingParams, complete
    for output in complete(EngineConfig(model="models/demo"), ["def gcd(a, b):"], SamplingParams(max_tokens=64)):
        print(output.completions[0].text)

Programs that keep an engine: docs/embedding.md.
"""

from __future__ import annotations

from launch.complete import complete, open_engine
from runtime.config import EngineConfig
from runtime.daemon.client import AsyncSlotClient, SlotClient, SlotError
from runtime.engine import Engine
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.client import EngineClient, EngineStopped, PromptRequest
from runtime.frontend.outputs import Delta, RequestOutput
from runtime.frontend.structured import structured
from runtime.frontend.validation import RequestError
from runtime.schedule.request import FinishReason, SamplingParams

__all__ = [
    "AsyncEngine",
    "AsyncSlotClient",
    "Delta",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "EngineStopped",
    "FinishReason",
    "PromptRequest",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SlotClient",
    "SlotError",
    "complete",
    "open_engine",
    "structured",
]
