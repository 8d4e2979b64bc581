"""A process that answers messages: one that ends or hangs costs its message alone; grammars that one compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.frontend.structured import structured
from runtime.grammar_check import GrammarChecker, Verdict
from runtime.helper_process import HelperProcess
from tests.runtime.frontend import small_tokenizers

pytestmark = pytest.mark.slow
ECHO = "answer_all(lambda first: lambda said: first + said if said != b'end' else exit(1))"
DEAF = "answer_all(lambda first: lambda said: __import__('time').sleep(3600))"


def wait_for(answers: Callable[[], Sequence[Any]], count: int) -> list[Any]:
    found, until = list[Any](), time.monotonic() + 300
    while len(found) < count:
        assert time.monotonic() < until
        found += answers()
        time.sleep(0.01)
    return found


@contextmanager
def helper(main: str, *given: Any) -> Iterator[HelperProcess]:
    process = HelperProcess("runtime.helper_process", main, *given)
    yield process
    process.close()


def test_a_message_with_which_the_process_ends_has_no_answer_and_the_next_one_has() -> None:
    with helper(ECHO, lambda: b"a") as process:
        for at, said in enumerate((b"b", b"end", b"c")):
            process.ask(b"%d" % at, said)
        assert wait_for(process.answers, 3) == [(b"0", b"ab"), (b"1", None), (b"2", b"ac")]


def test_there_is_another_process_however_many_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send what ends one as often as it likes."""
    monkeypatch.setattr("runtime.helper_process._MOST_FAILURES", 2)
    with helper(ECHO, lambda: b"a") as process:
        for said in (b"end", b"end", b"end", b"c"):
            process.ask(said, said)
        assert wait_for(process.answers, 4) == [(b"end", None)] * 3 + [(b"c", b"ac")]


def test_what_a_library_prints_is_no_answer() -> None:
    with helper("answer_all(lambda first: lambda said: (print('loud', flush=True), said)[1])", bytes) as process:
        process.ask(b"0", b"b")
        assert wait_for(process.answers, 1) == [(b"0", b"b")]


def test_a_process_that_does_not_begin_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.helper_process._BEGINS_S", 0.1)
    monkeypatch.setattr("runtime.helper_process._MOST_FAILURES", 1)
    with helper("answer_all(lambda first: __import__('time').sleep(3600))", bytes) as process:
        process.ask(b"0", b"b")
        assert wait_for(process.answers, 1) == [(b"0", None)]


def test_descriptors_may_have_large_numbers() -> None:
    with ExitStack() as stack:
        for _ in range(1024):  # FD_SETSIZE
            stack.callback(os.close, os.dup(0))
        process = stack.enter_context(helper(ECHO, lambda: b"a"))
        process.ask(b"0", b"b")
        assert wait_for(process.answers, 1) == [(b"0", b"ab")]


def test_no_process_outlives_the_one_that_asks_it(tmp_path: Path) -> None:
    """Not even one that never answers."""
    at = tmp_path / "pid"
    does = f"__import__('pathlib').Path({str(at)!r}).write_text(str(__import__('os').getpid()))"
    main = f"answer_all(lambda first: lambda said: ({does}, __import__('time').sleep(3600)))"
    script = f"""
import pathlib, time
from runtime.helper_process import HelperProcess
HelperProcess("runtime.helper_process", {main!r}, bytes).ask(b"", b"")
while not pathlib.Path({str(at)!r}).exists():
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    state = Path(f"/proc/{at.read_text()}/stat")
    wait_for(lambda: [None] if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z" else [], 1)


def test_a_process_that_does_not_answer_is_killed() -> None:
    with helper(DEAF, lambda: b"", 0.1) as process:
        process.ask(b"0", b"")
        assert wait_for(process.answers, 1) == [(b"0", None)]


def test_a_process_that_never_begins_answers_nothing() -> None:
    def broken() -> bytes:
        raise OSError("no tokenizer")

    with helper("exit(1)", lambda: b"") as ends, helper(ECHO, broken) as unread:
        for process in (ends, unread):
            for _ in range(3):
                process.ask(b"0", b"")
            assert wait_for(process.answers, 3) == [(b"0", None)] * 3


def test_verdicts_about_grammars() -> None:
    pytest.importorskip("llguidance")
    checker = GrammarChecker(small_tokenizers.byte_level().to_json, 400, (0,))
    checker.start()
    for number, grammar in enumerate(
        (structured(regex="a+"), structured(json={"type": "array", "items": {"$ref": "#"}}), "start: nothing")
    ):
        checker.ask(number, grammar)
    regular, other, refused = wait_for(checker.verdicts, 3)
    assert (regular, other) == (Verdict(0, True, ""), Verdict(1, False, ""))
    assert "nothing" in refused.error
    checker.close()
