"""What users and their scripts rely on: what `import lockstride` offers, and what public_face.json records of flags,
rows and files.
"""

from __future__ import annotations

import copy
import json

import pytest

import lockstride
from runtime.frontend.engine_protocol import EngineProtocol
from tests.launch.public_face import RECORD, Face, as_json, found

ON_PURPOSE = (
    "If that is on purpose, `python -m tests.launch.public_face` records it; say in CHANGELOG.md what it means for "
    "users. Scripts break where something is gone: rather keep it, or make it an alias."
)


@pytest.fixture(scope="module")
def face() -> Face:
    return found()


def changes(recorded: Face, face: Face) -> list[str]:
    """A line for each entry of public_face.json that the code no longer has so."""
    lines = []
    for section in sorted(recorded.keys() | face.keys()):
        before, after = recorded.get(section, {}), face.get(section, {})
        for what in sorted(before.keys() | after.keys()):
            was, now = set(before.get(what, ())), set(after.get(what, ()))
            told = [f"gone: {', '.join(sorted(was - now))}"] if was - now else []
            told += [f"new: {', '.join(sorted(now - was))}"] if now - was else []
            if told:
                lines.append(f"{section} of {what}: {'; '.join(told)}")
    return lines


def test_flags_rows_and_files_are_as_recorded(face: Face) -> None:
    changed = changes(json.loads(RECORD.read_text()), face)
    assert not changed, "\n".join(["The public face has changed.", *changed, ON_PURPOSE])
    assert RECORD.read_text() == as_json(face), f"{RECORD} is in another order or form. {ON_PURPOSE}"


def test_a_change_is_named(face: Face) -> None:
    other = copy.deepcopy(face)
    other["flags"]["generate"].remove("--overwrite")
    other["fields"]["generate error row, simple"].append("error.hint")
    other["formats"]["tuned tables"] = ["3"]
    del other["fields"]["report.json"]
    first, second, third, fourth = changes(face, other)
    assert first == "fields of generate error row, simple: new: error.hint"
    assert second.startswith("fields of report.json: gone: created, environments, failures[].folder, ")
    assert third == "flags of generate: gone: --overwrite"
    assert fourth == "formats of tuned tables: gone: 2; new: 3"


def test_the_public_names_are_what_they_say() -> None:
    assert sorted(lockstride.__all__) == [
        *("AsyncEngine", "AsyncSlotClient", "Delta", "Engine", "EngineClient", "EngineConfig", "EngineStopped"),
        "FinishReason",
        *("PromptRequest", "RequestError", "RequestOutput", "SamplingParams", "SlotClient", "SlotError"),
        *("complete", "open_engine", "structured"),
    ]
    for name in lockstride.__all__:
        assert getattr(lockstride, name).__name__ == name


def test_the_engine_has_everything_a_front_end_needs() -> None:
    needed = {name for name in vars(EngineProtocol) if not name.startswith("_")}
    assert needed
    assert {name for name in needed if not hasattr(lockstride.Engine, name)} <= {"config", "model_config", "stopped"}


def test_steps_are_chained_unless_somebody_asks_for_the_serial_engine() -> None:
    assert lockstride.EngineConfig(model="m", device="cpu").chain_depth == 2
    assert lockstride.EngineConfig(model="m", device="cpu", chain_depth=0).serial
