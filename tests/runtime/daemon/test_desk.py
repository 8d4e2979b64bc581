"""The verbs, one by one, over the real scheduler and a scripted device."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from runtime.daemon.desk import Desk
from runtime.daemon.frames import END_OF_COMMAND, Kind
from runtime.daemon.session import Connection
from runtime.frontend.framing import unpack_ids
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import FinishReason
from tests.runtime.daemon.listener import Listener
from tests.runtime.daemon.scripted import ScriptedEngine
from tests.runtime.frontend import small_tokenizers
from tests.runtime.schedule.fake_device import complete_alone

PROMPT = "[1,2,3,4,5]"
IDS = (1, 2, 3, 4, 5)


def alone(engine_id: int, prompt: tuple[int, ...], tokens: int) -> list[int]:
    return list(complete_alone(engine_id, prompt, (), len(prompt) + tokens)[0])


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_session_by_quanta(depth: int) -> None:
    client = Listener(ScriptedEngine(depth=depth))
    assert client.ask(f"REQ 7 START {PROMPT} 10 4") == {"verb": "START", "place": 0, "epoch": 1, "tokens": 5}
    client.run_until_idle()
    prefilled = client.engine.counters["prefill_tokens"]
    assert prefilled == 5
    assert [f.count for f in client.of(7, Kind.QUANTUM_DONE)] == [4]
    assert client.ask("REQ 7 CONTINUE 4 1") == {"verb": "CONTINUE", "epoch": 1, "left": 2}
    client.run_until_idle()
    client.ask("REQ 7 CONT=100")
    client.run_until_idle()
    assert client.tokens(7) == alone(0, IDS, 10)
    assert [f.count for f in client.of(7, Kind.QUANTUM_DONE)] == [4, 8]
    assert [f.done for f in client.of(7, Kind.DONE)] == [(FinishReason.LENGTH, 10)]
    assert client.engine.counters["prefill_tokens"] == prefilled, "no quantum computes anything again"
    assert client.refused("REQ 7 CONTINUE 1") == "there is no session 7 on this connection"
    client.engine.check_all_is_back()


def test_turns_of_a_session_that_is_kept() -> None:
    client = Listener(ScriptedEngine())
    client.ask(f"REQ 1 START {PROMPT} 6 6 keep=1")
    client.run_until_idle()
    assert client.refused("REQ 1 CONTINUE 1") == "its answer is complete: EXTEND or CANCEL it"
    before = client.engine.counters["prefill_tokens"]
    assert client.ask("REQ 1 EXTEND [9,8] 3 2")["epoch"] == 2
    client.run_until_idle()
    assert client.engine.counters["prefill_tokens"] == before + 3, "two that were said, and the newest before them"
    assert client.refused("REQ 1 CONTINUE 1 1") == "stale: it was meant for epoch 1, the session is in epoch 2"
    client.ask("REQ 1 CONTINUE 1 2")
    client.run_until_idle()
    first = alone(0, IDS, 6)
    assert client.tokens(1, 1) == first
    assert client.tokens(1, 2) == alone(0, (*IDS, *first, 9, 8), 3)
    client.ask("REQ 1 CANCEL")
    assert client.frames[-1].text == "cancelled" or client.frames[-2].text == "cancelled"
    client.run_until_idle()
    client.engine.check_all_is_back()


def test_a_cancelled_id_may_begin_again_and_its_epoch_goes_on() -> None:
    client = Listener(ScriptedEngine())
    client.ask(f"REQ 1 START {PROMPT} 20 20")
    client.turn()
    client.ask("CANCEL 1")
    told = len(client.frames)
    assert client.ask(f"REQ 1 START {PROMPT} 20 2")["epoch"] == 3
    client.run_until_idle()
    assert client.refused("REQ 1 CONTINUE 1 1").startswith("stale: it was meant for epoch 1")
    assert {f.epoch for f in client.frames[told:] if f.kind is Kind.TOKEN} == {3}, "nothing of the old one comes"
    assert client.tokens(1, 3) == alone(1, IDS, 2)


def test_a_slot_in_use_is_never_overwritten() -> None:
    client = Listener(ScriptedEngine())
    assert client.ask(f"REQ 1 SLOT 4 START {PROMPT} 9 1")["place"] == 4
    assert client.refused(f"REQ 2 SLOT 4 START {PROMPT} 9 1") == "SLOT 4 is taken: a slot in use is never overwritten"
    assert client.refused(f"REQ 2 SLOT 6 START {PROMPT} 9 1") == "SLOT 6: places are 0 to 5; see --max-sessions"
    client.run_until_idle()
    client.ask("SLOT 4 CONTINUE 2")
    client.run_until_idle()
    assert client.tokens(1) == alone(0, IDS, 3)
    assert client.refused("REQ 3 SLOT 4 CONTINUE 2") == "SLOT 4 has no such session of this connection"
    other = Listener(client.engine, client.desk)
    assert other.refused("SLOT 4 CONTINUE 2") == "SLOT 4 has no such session of this connection"
    assert other.ask("LIST_SLOTS") == {"verb": "LIST_SLOTS", "slots": 6, "taken": {"4": -1}}
    assert client.ask("LIST_SLOTS")["taken"] == {"4": 1}
    (listed,) = client.ask("LIST_REQUESTS")["requests"]
    assert listed == {
        "request": 1, "slot": 4, "phase": "parked", "remaining": 6, "emitted": 3, "quantum": 1, "epoch": 1, "tokens": 8
    }  # fmt: skip


def test_a_refused_restore_changes_nothing() -> None:
    client = Listener(ScriptedEngine())
    for session in (1, 2, 3):
        client.ask(f"REQ {session} SLOT {session} START {PROMPT} 9 1")
    client.run_until_idle()
    assert client.refused("REQ 2 SLOT 3 RESTORE 1") == "SLOT 3 is taken: a slot in use is never overwritten"
    assert [listed["request"] for listed in client.ask("LIST_REQUESTS")["requests"]] == [1, 2, 3]
    assert client.ask("REQ 2 SLOT 2 RESTORE 1")["place"] == 2, "its own place is free for it"


def test_no_prompt_file_and_no_option_stops_the_others(tmp_path: Path) -> None:
    """A pipe would wait for its writer; lists within lists go deeper than the reader, at a depth nobody knows."""
    client = Listener(ScriptedEngine())
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert "is no regular file" in client.refused(f"REQ 1 START {path} 4 2")
    for depth in range(900, 1010):
        nested = "[" * depth + "]" * depth
        for option in ("stop_ids", "stop"):
            assert client.refused(f"REQ 1 START {PROMPT} 8 2 {option}={nested}")
    assert client.ask("LIST_SLOTS")["taken"] == {}


def test_a_fork_and_a_restore() -> None:
    client = Listener(ScriptedEngine())
    client.ask(f"REQ 1 START {PROMPT} 12 4 keep=1")
    client.run_until_idle()
    known = (*IDS, *alone(0, IDS, 4))
    client.ask("REQ 2 FORK 1")
    client.ask("REQ 2 CONTINUE 3")
    client.ask("REQ 1 CONTINUE 8")
    client.run_until_idle()
    assert client.tokens(2) == alone(1, known, 3)
    assert client.tokens(1) == alone(0, IDS, 12)
    client.ask("REQ 2 RESTORE 1")
    client.run_until_idle()
    assert client.refused("REQ 2 CONTINUE 1") == "its answer is complete: EXTEND or CANCEL it"
    client.ask("REQ 2 EXTEND [3] 2 2")
    client.run_until_idle()
    assert client.tokens(2, client.frames[-1].epoch) == alone(2, (*IDS, *alone(0, IDS, 12), 3), 2)


def test_sched_step_serves_one_after_the_other() -> None:
    client = Listener(ScriptedEngine())
    for request in (1, 2, 3):
        client.ask(f"REQ {request} START {PROMPT} 20 2")
    client.run_until_idle()
    served = []
    for _ in range(7):
        served += client.ask("SCHED_STEP")["requests"]
        client.run_until_idle()
    assert served == [1, 2, 3, 1, 2, 3, 1]
    assert [len(client.tokens(request)) for request in (1, 2, 3)] == [8, 6, 6]
    assert client.ask("SCHED_PEEK 2")["requests"] == [2, 3]
    steps = client.engine.steps
    assert client.ask("SCHED_BATCH_STEP")["requests"] == [2, 3, 1]
    client.run_until_idle()
    assert client.engine.steps == steps + 1, "one step for all, whatever their lengths"
    assert [len(client.tokens(request)) for request in (1, 2, 3)] == [9, 7, 7]


def test_sched_step_without_anybody() -> None:
    assert Listener(ScriptedEngine()).ask("SCHED_STEP") == {"verb": "SCHED_STEP", "idle": True}


@pytest.mark.parametrize("quantum", [1, 2, 8])
@pytest.mark.parametrize("depth", [0, 2, 4])
def test_a_drain_is_fair_and_ends(depth: int, quantum: int) -> None:
    """16 sessions over 3 rows: at any time each has had its share, within one quantum and what is in flight."""
    engine = ScriptedEngine(depth=depth, rows=3, slots=22, max_sessions=16, blocks=400)
    client = Listener(engine)
    for request in range(1, 17):
        client.ask(f"REQ {request} START {PROMPT} 30 {quantum}")
    client.run_until_idle()
    assert client.say("SCHED_DRAIN") is None, "it is answered when all is over"
    while client.engine.has_work or client.connection.draining:
        client.turn()
        gained = [len(client.tokens(request)) for request in range(1, 17)]
        share = sum(gained) / 16
        assert all(abs(tokens - share) <= quantum for tokens in gained), gained
    assert [client.tokens(request) for request in range(1, 17)] == [alone(i, IDS, 30) for i in range(16)]
    assert (client.frames[-1].kind, client.frames[-1].answer) == (Kind.ACK, {"verb": "SCHED_DRAIN"})
    told = [f.count for f in client.of(5, Kind.QUANTUM_DONE)]
    assert told == list(range(quantum, 30, quantum))
    engine.check_all_is_back()


@pytest.mark.parametrize("depth", [0, 2, 4])
@pytest.mark.parametrize("quantum", [1, 8])
def test_a_drain_of_as_many_as_there_are_rows_loses_no_step(depth: int, quantum: int) -> None:
    client = Listener(ScriptedEngine(depth=depth, max_model_len=200, blocks=300))
    for request in (1, 2, 3):
        client.ask(f"REQ {request} START [{request},2,3] 100 {quantum}")
    client.say("SCHED_DRAIN")
    client.run_until_idle()
    assert [len(client.tokens(request)) for request in (1, 2, 3)] == [100] * 3
    assert client.engine.steps == 100, "the first token comes with the prompt, each other one with one step"


@pytest.mark.parametrize("depth", [0, 2, 4])
@pytest.mark.parametrize("quantum", [1, 8, 30])
@pytest.mark.parametrize("width", [2, 8])
def test_a_drain_with_windows_loses_no_step(width: int, quantum: int, depth: int) -> None:
    """The end of a quantum moves before a window in flight can have come to it: as many steps as with one quantum."""

    def steps(quantum: int) -> int:
        engine = ScriptedEngine(widths=(width,), depth=depth, max_model_len=200, blocks=300)
        client = Listener(engine)
        for request in (1, 2, 3):
            client.ask(f"REQ {request} START [{request},2,3] 100 {quantum}")
        client.say("SCHED_DRAIN")
        client.run_until_idle()
        assert [client.tokens(request) for request in (1, 2, 3)] == [alone(i, (i + 1, 2, 3), 100) for i in range(3)]
        return engine.steps

    assert steps(quantum) == steps(100)


def test_a_new_session_is_let_in_during_a_drain() -> None:
    engine = ScriptedEngine(depth=2, rows=2, slots=10, max_sessions=8, blocks=400)
    client, other = Listener(engine), None
    for request in range(1, 7):
        client.ask(f"REQ {request} START {PROMPT} 40 1")
    client.run_until_idle()
    client.say("SCHED_DRAIN")
    for _ in range(20):
        client.turn()
    other = Listener(engine, client.desk)
    other.ask(f"REQ 1 START {PROMPT} 4 4")
    for _ in range(40):
        client.turn()
    other.read()
    assert len(other.tokens(1)) == 4
    assert client.connection.draining


@pytest.mark.parametrize("running", [True, False])
def test_every_line_that_drains_gets_its_answer(running: bool) -> None:
    client = Listener(ScriptedEngine())
    if running:
        client.ask(f"REQ 1 START {PROMPT} 9 3")
    client.say("SCHED_DRAIN")
    client.say("REQ 7 SCHED_BATCH_DRAIN")
    client.run_until_idle()
    client.say("SCHED_DRAIN")
    answers = [(f.kind, f.request, f.answer) for f in client.frames[-3:]]
    assert answers == [(Kind.ACK, request, {"verb": "SCHED_DRAIN"}) for request in (0, 7, 0)]


def test_late_answers_have_the_id_of_their_line() -> None:
    client = Listener(ScriptedEngine())
    client.ask(f"REQ 1 START {PROMPT} 9 3")
    client.run_until_idle()
    client.say("REQ 5 SCHED_PROBE")
    client.say("REQ 6 SCHED_PROBE")
    client.run_until_idle()
    assert [(f.request, f.answer["sessions"]) for f in client.frames[-2:]] == [(5, 1), (6, 1)]


def test_auto_runs_until_budgets_end() -> None:
    client = Listener(ScriptedEngine())
    client.ask("MODE auto")
    client.ask(f"REQ 1 START {PROMPT} 11 4")
    client.run_until_idle()
    assert client.tokens(1) == alone(0, IDS, 11)
    assert client.refused("REQ 1 CONTINUE 4") == "there is no session 1 on this connection"
    assert [f.count for f in client.of(1, Kind.QUANTUM_DONE)] == [4, 8]


def test_the_probe_commits_nothing() -> None:
    engine = ScriptedEngine(max_sessions=6)
    client = Listener(engine)
    for request in (1, 2):
        client.ask(f"REQ {request} START [{request},2,3] 20 3")
    client.run_until_idle()
    before = client.ask("LIST_REQUESTS")
    assert client.say("SCHED_PROBE") is None
    client.run_until_idle()
    probed = client.frames[-1]
    assert probed.kind is Kind.ACK
    # The scripted device draws by the id of whoever asks, and forks have ids of their own: each pair differs.
    assert probed.answer == {
        "verb": "SCHED_PROBE", "sessions": 2, "tokens": 2, "mismatches": 2, "logprob_difference": None
    }  # fmt: skip
    assert client.ask("LIST_REQUESTS") == before
    assert len(engine.scheduler.ledger.sessions) == 2, "the forks are gone"
    for request in (1, 2):
        client.ask(f"REQ {request} CONTINUE 17")
    client.run_until_idle()
    assert client.tokens(1) == alone(0, (1, 2, 3), 20)


def test_a_slow_reader_stalls_only_itself_and_is_lost_in_the_end() -> None:
    engine = ScriptedEngine(max_model_len=2000, blocks=2000)
    desk = Desk(engine)
    slow, quick = Connection(soft=200, hard=2000), Listener(engine, desk)
    desk.connect(slow)
    for line in ("TAGGED 1", "MODE auto", f"REQ 1 START {PROMPT} 400 4"):
        desk.line(slow, line)
    quick.ask("MODE auto")
    quick.ask(f"REQ 1 START {PROMPT} 300 4")
    quick.run_until_idle()
    assert quick.tokens(1) == alone(1, IDS, 300)
    assert (slow.behind, slow.lost) == (True, None)
    assert slow.sessions[1].shown < 100, "nothing more is granted to it"
    slow.unread.clear()
    desk.line(slow, f"REQ 2 START {PROMPT} 1900 1900")
    slow.auto = False
    quick.run_until_idle()
    assert str(slow.lost).startswith("it has not read")
    desk.disconnect(slow)
    quick.run_until_idle()
    engine.check_all_is_back()


def test_parked_sessions_that_give_way_are_told() -> None:
    engine = ScriptedEngine(blocks=11, max_model_len=48)
    client = Listener(engine)
    for request in (1, 2, 3, 4):
        client.ask(f"REQ {request} START [{request},2,3,4,5,6,7,8,9] 30 3")
        client.run_until_idle()
    kinds = Counter(f.kind for f in client.frames)
    assert kinds[Kind.EVICTED] >= 1
    for request in (1, 2, 3, 4):
        client.ask(f"REQ {request} CONTINUE 6")
        client.run_until_idle()
        assert client.tokens(request) == alone(request - 1, (request, 2, 3, 4, 5, 6, 7, 8, 9), 9)


def test_closed_for_want_of_room_is_told() -> None:
    engine = ScriptedEngine(blocks=11, max_model_len=48, session_policy="close")
    client = Listener(engine)
    for request in (1, 2, 3, 4):
        client.ask(f"REQ {request} START [{request},2,3,4,5,6,7,8,9] 30 3")
        client.run_until_idle()
    closed = [f for f in client.frames if f.kind is Kind.CLOSED]
    assert [f.request for f in closed] == [1]
    assert closed[0].text == "closed: memory is short, and it was parked for longest"


def test_the_plain_stream() -> None:
    """Golden: ids, and -1 at the end of a quantum, of the answer, of a refusal."""
    engine = ScriptedEngine()
    desk, plain = Desk(engine), Connection()
    desk.connect(plain)
    told = []
    for line in (f"START {PROMPT} 3 2", "CONTINUE 5", "CONTINUE 5", "nonsense", "LIST_REQUESTS"):
        desk.line(plain, line)
        while engine.has_work:
            desk.output(engine.step())
        told.append(bytes(plain.unread))
        plain.unread.clear()
    first, second, third = (token.to_bytes(4, "little") for token in alone(0, IDS, 3))
    end = b"\xff\xff\xff\xff"
    assert told == [first + second + end, third + end, end, end, end]


@pytest.mark.parametrize(
    ("lines", "tokens"),
    [
        ([f"START {PROMPT} 6 2", "SCHED_DRAIN"], 6),
        ([f"START {PROMPT} 6 2", "SCHED_DRAIN", "SCHED_DRAIN"], 6),
        (["MODE auto", f"START {PROMPT} 6 2"], 6),
        ([f"START {PROMPT} 6 2", "MODE auto", "MODE client"], 2),
        ([f"START {PROMPT} 6 2", "CONTINUE 1", "CONTINUE 1"], 4),
        ([f"START {PROMPT} 6 2", "CANCEL"], 0),
    ],
)
def test_a_plain_stream_has_an_end_for_each_command(lines: list[str], tokens: int) -> None:
    """Of lines that all came before the engine took a turn."""
    engine = ScriptedEngine()
    desk, plain = Desk(engine), Connection()
    desk.connect(plain)
    for line in lines:
        desk.line(plain, line)
    desk.grant()
    while engine.has_work:
        desk.output(engine.step())
        desk.grant()
    assert unpack_ids(bytes(plain.unread)).count(END_OF_COMMAND) == len(lines)
    assert len(unpack_ids(bytes(plain.unread))) == len(lines) + tokens


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("REQ 1 CONTINUE", "the quantum is '', but must be a whole number from 1 to 2147483647"),
        ("REQ x CONTINUE 1", "the number of REQ is 'x', but must be a whole number from 0 to 1073741823"),
        ("REQ 1 REQ 2 CONTINUE 1", "REQ is there twice, or behind SLOT: [REQ id] [SLOT place] verb"),
        (f"START {PROMPT} 1 1", "a session has an id of its own, 1 or more: REQ id ..."),
        (f"REQ 1 START {PROMPT} 0 1", "the budget is '0', but must be a whole number from 1 to 2147483647"),
        ("REQ 1 START [1,99] 1 1", "prompt token 1 is 99, but the vocabulary has ids 0 to 28"),
        ("REQ 1 START [] 1 1", "the prompt is empty: give at least one token"),
        ('REQ 1 START "text" 1 1', "the prompt is a text, but the model folder has no tokenizer: give [token, ids]"),
        (f"REQ 1 START {PROMPT} 1 1 keep=2", "option keep is '2', which it cannot be"),
        (f"REQ 1 START {PROMPT} 1 1 top_k=٣", "option top_k is '٣', which it cannot be"),
        (f"REQ 1 START {PROMPT} 1 1 min_p=0.0_1", "option min_p is '0.0_1', which it cannot be"),
        (f"REQ 1 START {PROMPT} 1 1 temperature=-1", "temperature is -1, but must be at least 0 and at most 1000"),
        ("TAGGED 1", "TAGGED is the first line of a connection, or none"),
        ("MODE fast", "the mode is 'fast', but must be client or auto"),
        ("SCHED_PROBE", "there is nothing to probe, or no room: 3 sessions can be forked twice"),
        ("REQ 1 START /nowhere/at/all 1 1", "the prompt file '/nowhere/at/all' cannot be read"),
    ],
)
def test_what_is_refused_is_explained(line: str, message: str) -> None:
    client = Listener(ScriptedEngine())
    assert client.refused(line).startswith(message)
    assert not client.engine.has_work


@pytest.mark.parametrize("drained", [2, 3, 6])
@pytest.mark.parametrize("verb", ["START", "CONTINUE"])
def test_a_drain_of_as_many_sessions_as_rows_keeps_nobody_out(drained: int, verb: str) -> None:
    """None of these parks, for nobody else drains: who goes on by command gets a row all the same."""
    engine = ScriptedEngine(depth=2, rows=2, slots=10, max_sessions=8, blocks=4000, max_model_len=600)
    other = Listener(engine)
    if verb == "CONTINUE":
        other.ask(f"REQ 1 START {PROMPT} 40 2")
        other.run_until_idle()
    client = Listener(engine, other.desk)
    for request in range(1, 1 + drained):
        client.ask(f"REQ {request} START {PROMPT} 500 4")
    client.run_until_idle()
    client.say("SCHED_DRAIN")
    for _ in range(20):
        client.turn()
    other.ask("REQ 1 CONTINUE 2 1" if verb == "CONTINUE" else f"REQ 1 START {PROMPT} 4 4")
    for _ in range(60):
        client.turn()
    other.read()
    assert len(other.tokens(1)) == 4
    assert client.connection.draining
    client.run_until_idle()
    assert [len(client.tokens(request)) for request in range(1, 1 + drained)] == [500] * drained


@pytest.mark.parametrize("policy", ["evict", "close"])
def test_forks_of_a_probe_take_the_places_that_are_left(policy: Any) -> None:
    """One more session of the engine would end a parked one, though a probe commits nothing."""
    engine = ScriptedEngine(depth=2, max_sessions=4, blocks=400, session_policy=policy)
    client = Listener(engine)
    for request in (1, 2):
        client.ask(f"REQ {request} START {PROMPT} 30 4 keep=1")
    client.run_until_idle()
    other = Listener(engine, client.desk)
    client.say("SCHED_PROBE 1")
    for line in (f"REQ 1 START {PROMPT} 4 4", f"REQ 1 SLOT 3 START {PROMPT} 4 4"):
        assert other.refused(line).startswith("a probe takes the 2 places that are left")
    client.run_until_idle()
    other.ask(f"REQ 1 START {PROMPT} 4 4")
    other.run_until_idle()
    assert len(other.tokens(1)) == 4
    assert not [frame for frame in (*client.frames, *other.frames) if frame.kind in (Kind.ERROR, Kind.CLOSED)][2:]
    assert not client.of(1, Kind.CLOSED)
    assert not client.of(2, Kind.CLOSED)


def test_a_prompt_that_cannot_fit_is_refused_by_its_length(tmp_path: Path) -> None:
    """Before its JSON is decoded, its text tokenised, or its file read."""
    client = Listener(ScriptedEngine(max_model_len=64))
    client.desk.daemon.tokenizer = small_tokenizers.byte_level()
    with (
        mock.patch.object(client.desk.daemon.tokenizer, "_encoding", None),
        mock.patch("json.JSONDecoder.raw_decode", None),
    ):
        ids = f"[{'1,' * 300_000}1]"
        assert client.refused(f"REQ 1 START {ids} 4 4").startswith("the prompt has some 300000 tokens")
    with mock.patch.object(client.desk.daemon.tokenizer, "_encoding", None):
        said = client.refused(f'REQ 1 START "{"a" * 100_000}" 4 4')
    assert said.startswith("the prompt has at least ")
    said = client.refused(f"REQ 1 START [1] 4 4 stop=[{'0,' * 200_000}1]")
    assert said.startswith("the options have 400003 characters")
    with open(tmp_path / "ids", "wb") as file:
        file.truncate(1 << 40)  # of which nothing is stored
    assert "has 257 bytes or more" in client.refused(f"REQ 1 START {tmp_path / 'ids'} 4 4")


def test_a_panic_of_the_tokenizer_library_is_an_error_frame() -> None:
    client = Listener(ScriptedEngine())
    client.desk.daemon.tokenizer = Tokenizer(small_tokenizers.panicking_backend())
    assert client.refused('REQ 1 START "abc" 4 4').startswith("the prompt cannot be tokenised")
    client.ask(f"REQ 1 START {PROMPT} 4 4")


@pytest.mark.parametrize(("character", "count"), [("\x01", 4_300_000), ("a", (1 << 24) - 20)])
def test_what_a_line_is_refused_for_fits_in_a_frame(character: str, count: int) -> None:
    client = Listener(ScriptedEngine())
    said = client.refused("REQ 1 START " + character * count + " 4 4")
    assert said.startswith("the prompt file ")
    assert len(said) < 5000


def test_a_refused_extend_tells_the_epoch_that_the_session_is_in() -> None:
    client = Listener(ScriptedEngine(session_policy="refuse", blocks=12, max_model_len=48))
    client.ask(f"REQ 1 START {PROMPT} 12 4 keep=1")
    client.run_until_idle()
    client.ask(f"REQ 2 START {PROMPT} 20 1")
    client.run_until_idle()
    begun = client.ask("REQ 1 EXTEND [9] 40 4")["epoch"]
    client.run_until_idle()
    (error,) = client.of(1, Kind.ERROR)
    assert error.epoch == begun + 1
    client.ask(f"REQ 1 CONTINUE 2 {error.epoch}")
    client.run_until_idle()
    assert len(client.tokens(1)) == 6
