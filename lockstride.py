"""Lockstride's public face: what a program that uses it imports.

Knows: the names. Does not know: anything else; `python -m launch` is the way in for people.

    from lockstride import EngineConfig, SamplingParams, complete
    for output in complete(EngineConfig(model="models/demo"), ["def gcd(a, b):"], SamplingParams(max_tokens=64)):
        print(output.completions[0].text)
"""

from __future__ import annotations

from launch.complete import complete
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.frontend.outputs import RequestOutput
from runtime.schedule.request import SamplingParams

__all__ = ["Engine", "EngineConfig", "RequestOutput", "SamplingParams", "complete"]
