"""Tables of tokens against llguidance, bit for bit: in each state, over random schemas, expressions and choices."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from runtime.frontend.structured import structured
from runtime.grammar import Grammars
from runtime.grammar_tables import automaton as automata
from runtime.grammar_tables import maker as table_maker
from runtime.grammar_tables.automaton import automaton_of, known
from runtime.grammar_tables.maker import TableMaker, agrees, made_table
from runtime.grammar_tables.token_table import END, START, TokenTable, Vocabulary
from runtime.schedule.request import Request, SamplingParams, TableSpec
from runtime.schedule.tables import PLACES, TablePlaces
from tests.runtime.engine.table_rigs import hold, small_grammars
from tests.runtime.engine.test_grammar_masks import schema
from tests.runtime.frontend import small_tokenizers

pytest.importorskip("llguidance")

EOS, VOCABULARY = 0, 400
EXPRESSIONS = [
    "a", "a.[^b]x", "[0-9]{2,20}", "(ab|a)*c?", "[^a-z]+", "-?[1-9][0-9]{2,20}", "(é|日|👋){1,3}",
    r"\x20|\n[\x20\t]{0,9}", "(?:a|b{2,})+[x-z-]?", r"[\]\\\-\"]{2}", "([^\"]{0,5}, )*", "(a{3}|b)(c|(d|e)*)f",
]  # fmt: skip
INTEGERS: list[dict[str, Any]] = [
    {"minimum": low} | {"maximum": high}
    for low, high in ((0, 0), (-5, 17), (-120, -7), (3, 9999), (99, 101), (-1, 0), (1, 1000), (987, 12345))
] + [{}, {"minimum": 7}, {"minimum": -13}, {"maximum": 120}, {"maximum": -5}, {"exclusiveMinimum": 0}, {"maximum": 0}]
SCHEMAS: list[dict[str, Any]] = [
    {"type": "number"},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "string", "minLength": 2},
    {"type": "array", "items": {"type": "boolean"}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": {"type": "null"}, "minItems": 3},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": {"const": "x"}}},
    {"type": "object", "properties": {"a\n\"é": {"enum": [1, True, None, "\n\\é"]}, "b": {"type": "null"}},
     "required": ["b"], "additionalProperties": False},
    {"type": "string", "pattern": "^[\\d\"/-]{1,4}$"},
]  # fmt: skip
NONE: list[str] = [
    structured(regex=r"a\d"), structured(json={"type": "object"}), structured(json={"enum": ["\x07", 1]}),
    structured(json={"type": "string", "format": "date"}),
    structured(json={"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}),
    'start: "(" start? ")"\n', "start: a\n", "start: %json {}\n", "start: /a*?/\n", "start: /^a/\n", 'start: "a"i\n',
    'start: "a" ~ 2\n', 'start: ("a"\n', 'start: "a")\n', "start: @other\n", 'start: a\na[lazy]: "b" "c"\n', "{}", "",
    'start: (a "b")* TEXT\na[lazy]: TEXT ";"\nTEXT: /(.|\\n)*/\n',
]  # fmt: skip


RULES: list[str] = [
    'start: a (b | "c" d?)*\na: /b{1,2}/ | "d"+\nb: "(" a ")"\nd: ("x" | /y/) | "z"\n',
    'start: (<[1]> thoughts)? calls\nthoughts: TEXT <[2]>\ncalls: call ("\\n" call)*\ncall: "f:" text | "g" %json '
    + structured(json={"type": "integer", "maximum": 7}).removeprefix("start: %json ")
    + 'text[lazy]: TEXT ";a;b"\nTEXT: /(.|\\n)*/\n',
    json.dumps({"grammars": [{"lark_grammar": 'start: TEXT <[1]> "é"? @answer\nTEXT: /(.|\\n)*/\n'},
                             {"name": "answer", "lark_grammar": structured(choice=["a", "ab"])}]}),
]  # fmt: skip


def grammars_of() -> list[str]:
    of_numbers = [{"type": "integer"} | bounds for bounds in INTEGERS]
    random_ones = [schema(random.Random(f"tables {i}")) for i in range(60)]
    return [
        *(structured(regex=one) for one in EXPRESSIONS),
        *RULES,
        structured(choice=["a", "ab", "", '"x\\n', "é"]),
        *(structured(json=one) for one in [*of_numbers, *SCHEMAS, *random_ones]),
    ]


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[Grammars, Vocabulary]]:
    grammars = small_grammars(VOCABULARY, EOS)
    yield grammars, Vocabulary(grammars.token_texts(), (EOS,))
    grammars.close()


def test_automata_allow_the_bytes_that_llguidance_does_in_every_state() -> None:
    made = [(grammar, automaton) for grammar in grammars_of() if (automaton := automaton_of(grammar)) is not None]
    assert len(made) > 65
    for grammar, automaton in made:
        assert agrees(automaton, grammar), grammar
    assert {grammar for grammar, _ in made} >= {*RULES}


@pytest.mark.parametrize(
    "grammar",
    [
        *NONE,
        pytest.param(structured(json={"type": "string", "maxLength": 9999}), marks=pytest.mark.slow),
        pytest.param(structured(regex="(a{99}b{99}){99}"), marks=pytest.mark.slow),
    ],
)
def test_what_is_not_known_or_too_large_has_none(grammar: str) -> None:
    assert automaton_of(grammar) is None


@pytest.mark.parametrize(
    "schema", ['{"type": [["null"]]}', '{"$ref": []}', '{"$defs": [], "type": "null"}', '{"enum": 5}']
)
def test_a_schema_with_values_of_other_types_is_not_known(schema: str) -> None:
    assert not known(f"start: %json {schema}\n")


@pytest.mark.parametrize("grammars", ["[]", "5", "[{}]", '[{"lark_grammar": 5}]'])
def test_grammars_in_another_form_are_not_known(grammars: str) -> None:
    assert not known(f'{{"grammars": {grammars}}}')


def test_an_automaton_of_another_language_is_found_out() -> None:
    made = automaton_of(structured(regex="[ab]c{0,3}d"))
    assert made is not None
    assert agrees(made, structured(regex="(a|b)(c{1,3})?d"))
    for other in ("[ab]c*d", "[ab]c{0,2}d", "[ab]c{0,3}d?", "[abc]{0,4}d", "[ab](c{3}|cc|c)d"):
        assert not agrees(made, structured(regex=other)), other


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits", [{}, {"ignore_eos": True}, {"stops": (EOS, 19, 70)}, {"allowed_token_ids": tuple(range(0, 400, 3))}]
)
def test_masks_are_those_of_a_matcher_along_answers(small: tuple[Grammars, Vocabulary], limits: dict[str, Any]) -> None:
    grammars, vocabulary = small
    draw, compared = random.Random(str(limits)), 0
    stops = limits.get("stops", (EOS,))
    mask_W = np.zeros(-(-VOCABULARY // 32), np.int32)
    for grammar in [*RULES, *draw.sample(grammars_of(), 40)]:
        sampling = SamplingParams(grammar=grammar, **{name: one for name, one in limits.items() if name != "stops"})
        table = made_table(vocabulary, Request(0, [1], sampling, stops).table_spec)
        assert (table is None) <= (grammar not in RULES)
        if table is None:
            continue
        hold(grammars, grammar)
        for _ in range(3):
            matcher, state, answer = grammars.matcher(sampling, stops, ()), START, list[int]()
            while state != END and len(answer) < 30:
                matcher.allow(mask_W)
                wanted_V = np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:VOCABULARY].astype(bool)
                assert np.array_equal(table.next_SK[state][table.class_V] != 0, wanted_V), (grammar, answer)
                compared += 1
                if not wanted_V.any():
                    break
                answer.append(int(draw.choice(np.flatnonzero(wanted_V))))
                matcher.accept(answer[-1:])
                state = table.after(answer)
    assert compared > 300


def test_a_table_travels(small: tuple[Grammars, Vocabulary]) -> None:
    table = made_table(small[1], TableSpec(structured(regex="a{2,5}"), (EOS,), False, ()))
    assert table is not None
    again = TokenTable.from_bytes(table.to_bytes(), VOCABULARY)
    assert np.array_equal(again.class_V, table.class_V)
    assert np.array_equal(again.next_SK, table.next_SK)


def wait_for(maker: TableMaker, seconds: float = 60.0) -> tuple[bytes, bytes]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if made := maker.made():
            return made[0]
        time.sleep(0.01)
    raise TimeoutError


@pytest.mark.slow
def test_the_process_that_makes_them(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def asking(expression: str) -> Request:
        return Request(0, [1], SamplingParams(grammar=structured(regex=expression)), (EOS,))

    monkeypatch.setattr(table_maker, "POLICY", os.SCHED_OTHER)  # no core may be idle beside other tests
    maker = TableMaker(small_tokenizers.byte_level().to_json, VOCABULARY, (EOS,))
    assert maker.want(asking("[a-c]+"))
    assert not maker.want(asking("[a-c]+"))
    key, raw = wait_for(maker)
    assert key == asking("[a-c]+").table_key
    assert TokenTable.from_bytes(raw, VOCABULARY).next_SK.shape[0] == 4
    maker.forget(key)
    assert maker.want(asking("[a-c]+"))
    assert wait_for(maker) == (key, raw)
    assert maker.want(asking(r"\d"))
    assert wait_for(maker)[1] == b""
    maker.close()
    broken = TableMaker(lambda: "no tokenizer", VOCABULARY, (EOS,))
    assert broken.want(asking("[a-c]+"))
    assert wait_for(broken)[1] == b""
    assert "a process of runtime.grammar_tables.maker ended (no answer)" in caplog.text
    broken.close()


def test_places() -> None:
    """One that has been given back is free when the last step that may read it has landed."""
    landed = 5
    places = TablePlaces(lambda step: step <= landed)
    for number in range(PLACES):
        places.add(b"%d" % number)
    assert places.take(b"none") is None
    users = [place for place in map(places.take, list(places.places)) if place is not None]
    places.add(b"late")
    assert list(places.places) == [b"%d" % number for number in range(PLACES)]
    places.give_back(users[3], 6)
    places.give_back(users[4], 5)
    places.add(b"new")
    assert (places.places[b"new"].number, b"4" in places.places, b"3" in places.places) == (4, False, True)
    places.add(b"newer")  # in the place of one that nobody has taken yet
    assert b"new" not in places.places
    landed = 6
    assert (again := places.take(b"newer")) is not None
    assert again.number == 4
    places.add(b"newest")
    assert places.places[b"newest"].number == 3


def test_limits_are_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = structured(regex="(abc){5}")
    assert known(grammar)
    for limit in ("MOST_STATES", "MOST_WORK", "MOST_NODES"):
        with monkeypatch.context() as patched:
            patched.setattr(automata, limit, 9)
            assert automaton_of(grammar) is None
    assert automaton_of(grammar) is not None
