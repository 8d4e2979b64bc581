"""Sessions that stop strings and stop ids end: what the client sees is all that the session knows from then on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers

from runtime.daemon.desk import Desk
from runtime.daemon.frames import Kind
from runtime.daemon.session import Connection
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import FinishReason
from tests.runtime.daemon.listener import Listener
from tests.runtime.daemon.scripted import ScriptedEngine, ScriptedModel
from tests.runtime.frontend import small_tokenizers
from tests.runtime.schedule.fake_device import complete_alone

IDS = (1, 2, 3, 4, 5)
PROMPT = "[1,2,3,4,5]"
BY_STRING = (FinishReason.STOP, 6)


def alone(engine_id: int, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    return tuple(complete_alone(engine_id, prompt, (), len(prompt) + tokens)[0])


FIRST = alone(0, IDS, 20)  # "4&*,31&..." with tokens without text between


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder("models/demo")


def listener(tokenizer: Tokenizer, **limits: int | str) -> Listener[ScriptedEngine]:
    engine = ScriptedEngine(**limits)
    return Listener(engine, Desk(engine, tokenizer))


def text_of(client: Listener[ScriptedEngine], request: int) -> str:
    return "".join(frame.text for frame in client.of(request, Kind.TEXT))


def until_done(client: Listener[ScriptedEngine], request: int, quantum: int) -> None:
    client.run_until_idle()
    while not client.of(request, Kind.DONE):
        client.ask(f"REQ {request} CONTINUE {quantum}")
        client.run_until_idle()


@pytest.mark.parametrize("quantum", [1, 5, 20])
@pytest.mark.parametrize("depth", [0, 2, 4])
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(
    tokenizer: Tokenizer, depth: int, quantum: int
) -> None:
    """5 tokens end within the string. The engine is ahead of what it told, by its depth."""
    client = listener(tokenizer, depth=depth)
    client.ask(f'REQ 1 START {PROMPT} 20 {quantum} stop=["no, never", "*,"] text=1 keep=1')
    until_done(client, 1, quantum)
    assert tuple(client.tokens(1)) == FIRST[:6]
    assert text_of(client, 1) == "4&"
    assert [frame.done for frame in client.of(1, Kind.DONE)] == [BY_STRING]
    assert client.of(1)[-1].kind is Kind.DONE, "nothing comes behind it"
    assert client.refused("REQ 1 CONTINUE 1") == "its answer is complete: EXTEND or CANCEL it"
    assert client.ask("LIST_REQUESTS")["requests"][0]["tokens"] == 11
    assert client.ask("REQ 1 EXTEND [9,8] 3 3") == {"verb": "EXTEND", "epoch": 2, "tokens": 2}
    client.run_until_idle()
    assert tuple(client.tokens(1, 2)) == alone(1, (*IDS, *FIRST[:6], 9, 8), 3)
    client.ask("REQ 1 EXTEND [7] 2 2")
    client.run_until_idle()
    assert len(client.tokens(1, 3)) == 2, "from here on it is extended as any other"
    client.ask("REQ 1 CANCEL")
    client.run_until_idle()
    client.engine.check_all_is_back()


def test_without_keep_it_is_over_and_others_take_its_place(tokenizer: Tokenizer) -> None:
    client = listener(tokenizer, max_sessions=1)
    client.ask(f'REQ 1 START {PROMPT} 20 20 stop="*,"')
    client.run_until_idle()
    assert (tuple(client.tokens(1)), text_of(client, 1)) == (FIRST[:6], "")
    assert [frame.done for frame in client.of(1, Kind.DONE)] == [BY_STRING]
    client.ask(f"REQ 2 START {PROMPT} 4 4")
    client.run_until_idle()
    assert tuple(client.tokens(2)) == alone(1, IDS, 4)
    client.engine.check_all_is_back()


def test_a_drain_ends_with_its_stop_strings(tokenizer: Tokenizer) -> None:
    client = listener(tokenizer, depth=2)
    for request in range(1, 6):
        client.ask(f'REQ {request} START {PROMPT} 20 2 keep=1 stop="*,"')
    client.run_until_idle()
    client.say("SCHED_DRAIN")
    client.run_until_idle()
    assert client.frames[-1].answer == {"verb": "SCHED_DRAIN"}
    assert [frame.count for frame in client.of(1, Kind.QUANTUM_DONE)] == [2, 4, 6]
    assert [frame.done for frame in client.of(1, Kind.DONE)] == [BY_STRING]
    assert all(len(client.of(request, Kind.DONE)) == 1 for request in range(1, 6))


def test_a_plain_stream_has_no_token_behind_it(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    desk, plain = Desk(engine, tokenizer), Connection()
    desk.connect(plain)
    desk.line(plain, f'START {PROMPT} 20 20 stop="*,"')
    while engine.has_work:
        desk.output(engine.step())
    assert bytes(plain.unread) == b"".join(token.to_bytes(4, "little", signed=True) for token in (*FIRST[:6], -1))


def test_forks_know_what_was_shown(tokenizer: Tokenizer) -> None:
    """Of a session within a stop string, and of one that came to it."""
    within = alone(1, (*IDS, *FIRST[:5]), 1)[0]
    client = listener(tokenizer)
    client.ask(f'REQ 1 START {PROMPT} 20 5 keep=1 stop=["*,","*{tokenizer.decode((within,), ())}"]')
    client.run_until_idle()
    client.ask("REQ 2 FORK 1")
    client.ask("REQ 2 CONTINUE 9")
    client.ask("REQ 1 CONTINUE 9")
    client.run_until_idle()
    assert client.tokens(2) == [within], "it began before the fork"
    assert [frame.done for frame in client.of(1, Kind.DONE) + client.of(2, Kind.DONE)] == [BY_STRING] * 2
    client.ask("REQ 3 FORK 1")
    assert client.refused("REQ 3 CONTINUE 1") == "its answer is complete: EXTEND or CANCEL it"
    client.ask("REQ 3 EXTEND [9] 2 2")
    client.run_until_idle()
    assert tuple(client.tokens(3)) == alone(3, (*IDS, *FIRST[:6], 9), 2)
    client.desk.disconnect(client.connection)
    client.run_until_idle()
    client.engine.check_all_is_back()


def test_one_that_finds_no_room_again_waits_as_it_was(tokenizer: Tokenizer) -> None:
    client = listener(tokenizer, session_policy="refuse", blocks=12, max_model_len=48)
    client.ask(f'REQ 1 START {PROMPT} 20 20 keep=1 stop="*,"')
    client.run_until_idle()
    client.ask(f"REQ 2 START {PROMPT} 40 1")
    client.run_until_idle()
    client.ask("REQ 1 EXTEND [9] 20 20")
    client.run_until_idle()
    refused = client.of(1, Kind.ERROR)
    assert [frame.text[:8] for frame in refused] == ["EXTEND: "]
    assert client.ask("LIST_REQUESTS")["requests"][0]["phase"] == "complete"
    client.ask("REQ 2 CANCEL")
    client.run_until_idle()
    client.ask("REQ 1 EXTEND [9] 4 4")
    client.run_until_idle()
    assert tuple(client.tokens(1)[6:]) == alone(3, (*IDS, *FIRST[:6], 9), 4)


def test_tokens_before_min_tokens_complete_no_string(tokenizer: Tokenizer) -> None:
    client = listener(tokenizer)
    client.ask(f'REQ 1 START {PROMPT} 20 20 stop=["*,","1&"] min_tokens=7')
    client.run_until_idle()
    assert tuple(client.tokens(1)) == FIRST[:11]


def test_stop_ids_are_the_engine_s() -> None:
    client = Listener(ScriptedEngine())
    client.ask(f"REQ 1 START {PROMPT} 20 20 stop_ids=[28, 15]")
    client.run_until_idle()
    assert tuple(client.tokens(1)) == FIRST[:6]
    assert [frame.done for frame in client.of(1, Kind.DONE)] == [BY_STRING]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("stop=x", "option stop is 'x', which it cannot be"),
        ('stop="x', "'\"x' is no JSON"),
        ("stop=[1]", "option stop is '[1]', which it cannot be"),
        ('stop=""', "a stop string has 0 characters"),
        ('stop_ids="x"', "option stop_ids is '\"x\"', which it cannot be"),
        ("stop_ids=[99]", "stop_token_ids has 99"),
        ('stop="a" stop="b"', "'stop' is no option, or is there twice"),
    ],
)
def test_what_is_no_stop_is_refused(tokenizer: Tokenizer, option: str, message: str) -> None:
    client = listener(tokenizer)
    assert client.refused(f"REQ 1 START {PROMPT} 20 20 {option}").startswith(message)
    assert not client.engine.has_work


@pytest.mark.parametrize("option", ["response_format", "structured_outputs", "grammar", "tools", "tool_choice"])
def test_sessions_have_no_form_of_answers(tokenizer: Tokenizer, option: str) -> None:
    said = listener(tokenizer).refused(f"REQ 1 START {PROMPT} 20 20 {option}=1")
    assert said.startswith(f"{option!r} is no option, or is there twice: keep, ")


def test_text_needs_a_tokenizer() -> None:
    client = Listener(ScriptedEngine())
    assert client.refused(f'REQ 1 START {PROMPT} 20 20 stop="x"').startswith("stop strings are found in text, but")


def test_a_fork_of_a_stopped_session_is_one_session(tokenizer: Tokenizer) -> None:
    """The engine had let its parent go. Counted twice, it would take a row from every drain, for good."""
    client = listener(tokenizer, rows=2, slots=14, max_sessions=8, blocks=4000, max_model_len=600)
    client.ask(f'REQ 1 START {PROMPT} 20 20 keep=1 stop="*,"')
    client.run_until_idle()
    for _ in range(2):
        client.ask("REQ 2 FORK 1")
        client.ask("REQ 2 EXTEND [9] 400 400")
        client.say("SCHED_DRAIN")
        for _ in range(6):
            client.turn()
        (one,) = client.desk.daemon.by_engine.values()
        assert one.request == 2
        client.ask("REQ 2 CANCEL")
        client.run_until_idle()
        assert not client.desk.daemon.by_engine
    other = Listener(client.engine, client.desk)
    for request in (1, 2, 3):
        other.ask(f"REQ {request} START {PROMPT} 100 4")
    other.run_until_idle()
    other.say("SCHED_DRAIN")
    other.run_until_idle()
    assert [len(other.tokens(request)) for request in (1, 2, 3)] == [100] * 3


@pytest.fixture(scope="module")
def with_bos() -> Tokenizer:
    """A token a word, with <s> before each text."""
    words = {"<s>": 1, **{letter: 5 + at for at, letter in enumerate("abcdef")}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend)


def test_bos_begins_a_session_and_stands_nowhere_else_in_it(with_bos: Tokenizer) -> None:
    """EXTEND of a session that was parked, forked, or ended by a stop string, and which the engine begins again."""
    client = listener(with_bos)
    assert client.ask('REQ 1 START "a b" 2 2 keep=1')["tokens"] == 3
    client.run_until_idle()
    client.ask("REQ 2 FORK 1")
    client.run_until_idle()
    for request, engine_id in ((1, 0), (2, 1)):
        known = (1, 5, 6, *alone(0, (1, 5, 6), 2), 7, 8)
        assert client.ask(f'REQ {request} EXTEND "c d" 3 3')["tokens"] == 2
        client.run_until_idle()
        assert tuple(client.tokens(request, 2)) == alone(engine_id, known, 3)
    said = with_bos.decode(alone(2, (1, 5, 6), 9))
    client.ask(f'REQ 3 START "a b" 9 9 keep=1 stop="{said.split()[0]}"')
    client.run_until_idle()
    assert client.of(3, Kind.DONE)[0].done[0] is FinishReason.STOP
    assert client.ask('REQ 3 EXTEND "c d" 3 3')["tokens"] == 2


def test_more_text_has_no_space_that_was_not_sent() -> None:
    """As SentencePiece's normalizer puts one before every text."""
    tokenizer = small_tokenizers.sentencepiece()
    desk = listener(tokenizer).desk
    for line, names in (
        ('START "the" 2 2', ["<s>", "▁the"]),
        ('EXTEND "the" 2 2', ["t", "h", "e"]),
        ('EXTEND " the" 2 2', ["▁the"]),
        ('EXTEND "lo" 2 2', ["lo"]),
    ):
        command = desk.read(f"REQ 1 {line}").command
        assert command is not None
        prompt = command.prompt
        assert isinstance(prompt, tuple)
        assert [tokenizer.id_to_token(token) for token in prompt] == names


@pytest.mark.parametrize("forked", [False, True])
def test_text_for_a_session_or_its_fork_reads_as_it_was_sent(monkeypatch: pytest.MonkeyPatch, forked: bool) -> None:
    """What reaches the engine after FORK and EXTEND, and the text of the answer after it."""
    tokenizer = small_tokenizers.sentencepiece()
    engine, said = ScriptedEngine(), list[tuple[int, ...]]()
    engine.model_config = ScriptedModel(vocab_size=tokenizer.vocab_size)
    client, extend = Listener(engine, Desk(engine, tokenizer)), engine.extend

    def seen(request_id: int, epoch: int, token_ids: Sequence[int], *limits: int) -> None:
        said.append(tuple(token_ids))
        extend(request_id, epoch, token_ids, *limits)

    monkeypatch.setattr(engine, "extend", seen)
    client.ask('REQ 1 START "the" 2 2 keep=1 text=1')
    client.run_until_idle()
    client.ask("REQ 2 FORK 1")
    client.run_until_idle()
    request = 2 if forked else 1
    for text, names in (("the", ["t", "h", "e"]), (" the", ["▁the"]), ("lo", ["lo"])):
        client.ask(f'REQ {request} EXTEND "{text}" 2 2')
        client.run_until_idle()
        assert [tokenizer.id_to_token(token) for token in said.pop()] == names
    for epoch in (2, 3, 4):
        shown = "".join(frame.text for frame in client.of(request, Kind.TEXT) if frame.epoch == epoch)
        assert shown == tokenizer.decode(client.tokens(request, epoch), tokenizer.encode("lo"))


def test_a_text_with_its_own_special_tokens_gets_no_others(with_bos: Tokenizer) -> None:
    client = listener(with_bos)
    assert client.ask('REQ 1 START "<s>a b" 2 2 add_special_tokens=0')["tokens"] == 3
    assert client.ask('REQ 2 START "<s>a b" 2 2')["tokens"] == 4
