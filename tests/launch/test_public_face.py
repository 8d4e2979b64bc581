"""What `import lockstride` offers."""

from __future__ import annotations

import lockstride
from runtime.frontend.engine_protocol import EngineProtocol


def test_the_public_names_are_what_they_say() -> None:
    assert sorted(lockstride.__all__) == [
        *("AsyncEngine", "AsyncSlotClient", "Delta", "Engine", "EngineClient", "EngineConfig", "EngineStopped"),
        "FinishReason",
        *("PromptRequest", "RequestError", "RequestOutput", "SamplingParams", "SlotClient", "SlotError"),
        *("complete", "open_engine"),
    ]
    for name in lockstride.__all__:
        assert getattr(lockstride, name).__name__ == name


def test_the_engine_has_everything_a_front_end_needs() -> None:
    needed = {name for name in vars(EngineProtocol) if not name.startswith("_")}
    assert needed
    assert {name for name in needed if not hasattr(lockstride.Engine, name)} <= {"config", "model_config"}


def test_steps_are_chained_unless_somebody_asks_for_the_serial_engine() -> None:
    assert lockstride.EngineConfig(model="m", device="cpu").chain_depth == 2
    assert lockstride.EngineConfig(model="m", device="cpu", chain_depth=0).serial
