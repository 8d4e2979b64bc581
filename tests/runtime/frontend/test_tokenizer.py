"""Text from tokens, one at a time: equal to decoding at once, and never past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import runtime.frontend.tokenizer
from runtime.frontend.answer_text import StopMatcher, TextStream
from runtime.frontend.tokenizer import (
    ByteDetokenizer,
    Detokenizer,
    Tokenizer,
    open_detokenizer,
)
from runtime.frontend.tokenizer_files import TokenizerError
from tests.runtime.frontend import small_tokenizers

KINDS = [small_tokenizers.byte_level, small_tokenizers.sentencepiece]
few = settings(derandomize=True, max_examples=150, deadline=None, database=None)
texts = st.text(alphabet=st.sampled_from("abthelo .,é你🌍👩\u200d\n"), max_size=30)


def streamed(tokenizer: Tokenizer, ids: list[int], context: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer, context)
    return [*map(stream.push, ids), stream.flush()]


def streamed_by_bytes(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = open_detokenizer(tokenizer, [5, 6])
    assert isinstance(stream, ByteDetokenizer)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_round_trip(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    for text in ("hello the end", "你 é 🌍", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def metaspace(scheme: str) -> Tokenizer:
    """The space comes from the pre-tokenizer, as in newer folders of the same models."""
    backend = tokenizers.Tokenizer.from_str(small_tokenizers.sentencepiece_backend().to_str())
    backend.normalizer = tokenizers.normalizers.Sequence([])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return Tokenizer(backend)


CONTINUED: dict[str, Callable[[], Tokenizer]] = {
    **{kind.__name__: kind for kind in KINDS},
    **{scheme: partial(metaspace, scheme) for scheme in ("always", "first", "never")},
}


@pytest.mark.parametrize("kind", CONTINUED)
@pytest.mark.parametrize("text", ["hello", " hello", "the lo", "\nhello", "\n", "  a", "é", "你", ""])
def test_text_after_other_text_reads_as_it_was_sent(kind: str, text: str) -> None:
    tokenizer = CONTINUED[kind]()
    before = tokenizer.encode("a")
    assert tokenizer.decode([*before, *tokenizer.encode_continued(text)]) == "a" + text


def test_text_after_other_text_where_newlines_have_no_tokens() -> None:
    """As in Unigram tokenizers whose normalizer makes a blank of each: then another character stands before it."""
    backend = tokenizers.Tokenizer.from_str(small_tokenizers.sentencepiece_backend().to_str())
    backend.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Replace("\n", ""),
            tokenizers.normalizers.Prepend("▁"),
            tokenizers.normalizers.Replace(" ", "▁"),
        ]
    )
    tokenizer = Tokenizer(backend)
    for text in ("hello", " hello", "the lo"):
        assert tokenizer.decode([*tokenizer.encode("a"), *tokenizer.encode_continued(text)]) == "a" + text


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_ids_of_a_short_one(kind: Callable[[], Tokenizer], special: bool) -> None:
    """The library's other call, which lets other threads go on."""
    tokenizer, text = kind(), "hello the end. " * 400
    assert len(text) > 4000
    ids = tokenizer._backend.encode(text, add_special_tokens=special).ids
    assert tokenizer.encode(text, add_special_tokens=special) == ids


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@few
def test_streaming_any_ids_equals_decoding_at_once(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = kind()
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)
    generated, context = data.draw(ids), data.draw(ids)
    assert "".join(streamed(tokenizer, generated, context)) == tokenizer.decode(generated, context)


@given(data=st.data())
@few
def test_bytes_put_together_are_what_the_library_decodes(data: st.DataObject) -> None:
    """Any ids: halves of characters, special tokens between them, added tokens, and ids that no token has."""
    tokenizer = byte_level_with_added_tokens()
    broken = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i])]
    some = (
        st.integers(0, tokenizer.vocab_size + 1)
        | st.sampled_from(broken)
        | st.sampled_from(tokenizer.encode("🌍👩世é"))
    )
    generated = data.draw(st.lists(some, max_size=60))
    assert "".join(streamed_by_bytes(tokenizer, generated)) == tokenizer.decode(generated)


def byte_level_with_added_tokens() -> Tokenizer:
    """Added tokens are text as it is, also where their characters would stand for bytes, or for none."""
    backend = tokenizers.Tokenizer.from_str(small_tokenizers.byte_level_backend().to_str())
    backend.add_tokens(["<think>", "two words", "é", "世", "ÿ"])
    return Tokenizer(backend)


def test_a_character_is_shown_with_its_last_byte_and_rubbish_as_soon_as_it_is_sure() -> None:
    tokenizer = small_tokenizers.byte_level()
    world = tokenizer.encode("🌍")
    assert len(world) > 1
    assert streamed_by_bytes(tokenizer, world) == [*[""] * (len(world) - 1), "🌍", ""]
    assert streamed_by_bytes(tokenizer, [*world[:1], *tokenizer.encode("a")]) == ["", "\ufffda", ""]
    assert streamed_by_bytes(tokenizer, world[:1]) == ["", "\ufffd"]


def test_tokenizers_that_look_back_have_a_window() -> None:
    assert isinstance(open_detokenizer(small_tokenizers.sentencepiece()), Detokenizer)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=texts, answer=texts)
@few
def test_an_answer_continues_its_prompt(kind: Callable[[], Tokenizer], prompt: str, answer: str) -> None:
    tokenizer = kind()
    ids = tokenizer.encode(prompt + answer)
    for cut in range(1, len(ids)):
        before, after = ids[:cut], ids[cut:]
        if not tokenizer.decode(before).endswith("\ufffd") and before[-1] not in tokenizer.byte_ids:
            assert tokenizer.decode(before) + tokenizer.decode(after, before) == prompt + answer


@given(text=texts)
@few
def test_what_was_shown_is_never_taken_back_and_holds_no_half_character(text: str) -> None:
    tokenizer = small_tokenizers.byte_level()
    for shown in accumulate(streamed(tokenizer, tokenizer.encode(text), [])):
        assert text.startswith(shown)


def test_a_character_of_several_tokens_appears_when_it_is_complete() -> None:
    tokenizer = small_tokenizers.sentencepiece()
    ids = [tokenizer.encode("x")[-1]] + [tokenizer.encode("🌍")[-4:][i] for i in range(4)] + [tokenizer.encode("b")[-1]]
    assert streamed(tokenizer, ids, []) == ["x", "", "", "", "", "🌍b", ""]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@few
def test_a_window_that_is_cut_reads_as_it_does_at_once(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    """With a window so short that every run of broken bytes is cut, between halves of characters too."""
    tokenizer = kind()
    broken = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i])]
    some = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(broken) if broken else st.integers(0, 9)
    world = tokenizer.encode("🌍👩世é")
    runs = st.lists(some | st.sampled_from(world), max_size=40)
    generated = data.draw(runs) + data.draw(st.sampled_from([[], world])) + data.draw(runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.frontend.tokenizer, "_LONGEST_WAIT", 5)
        patch.setattr(runtime.frontend.tokenizer, "_OPEN_TOKENS", data.draw(st.integers(1, 5)))
        assert "".join(streamed(tokenizer, generated, [])) == tokenizer.decode(generated)


@pytest.mark.parametrize("length", [1000, 4000])
def test_rubbish_without_end_costs_no_more_a_token_than_text(length: int) -> None:
    """A greedy loop over half a character: the text is never at rest, and the window does not grow with it."""
    decoded = 0

    class Counting(Tokenizer):
        def decode(self, token_ids: Sequence[int], context: Sequence[int] = ()) -> str:
            nonlocal decoded
            decoded += len(token_ids)
            return super().decode(token_ids, context)

    tokenizer = Counting(small_tokenizers.byte_level_backend())
    half = tokenizer.encode("\U00013000")[0]
    pieces = streamed(tokenizer, [half] * length, [])
    assert decoded < 100 * length
    assert "".join(pieces) == "\ufffd" * length
    assert len(pieces[-1]) < 60, "it is shown while it comes"


def test_a_broken_run_of_byte_tokens_reads_as_it_does_at_once() -> None:
    """The decoder shows a run of byte tokens as rubbish as a whole when any part of it is rubbish."""
    tokenizer = small_tokenizers.sentencepiece()
    euro = [3 + byte for byte in "€".encode()]
    ids = [*euro, 3 + 0xE2, tokenizer.encode("b")[-1]]
    assert "".join(streamed(tokenizer, ids, [])) == tokenizer.decode(ids) == "\ufffd" * 4 + "b"


def test_a_special_token_does_not_end_a_run_of_byte_tokens() -> None:
    tokenizer = small_tokenizers.sentencepiece()
    end, euro = 2, [3 + byte for byte in "€".encode()]
    ids = [euro[0], end, *euro[1:], end, tokenizer.encode("b")[-1]]
    assert streamed(tokenizer, ids, []) == ["", "", "", "", "", "€b", ""]
    assert tokenizer.decode(ids) == "€b"
    assert tokenizer.decode(euro[1:], [5, euro[0], end]) == tokenizer.decode(euro[1:]), (
        "that prompt ends in a character"
    )


def test_the_first_space_of_an_answer_is_kept_after_a_prompt_only() -> None:
    tokenizer = small_tokenizers.sentencepiece()
    the = tokenizer.encode("the")[1:]
    assert tokenizer.decode(the) == "the"
    assert tokenizer.decode(the, tokenizer.encode("a")) == " the"
    assert tokenizer.decode(the, [1]) == "the"


def test_missing_and_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    small_tokenizers.save(small_tokenizers.byte_level_backend(), tmp_path)
    assert Tokenizer.from_folder(tmp_path).vocab_size == 360


# ---- stop strings ----


def first_stop(text: str, stops: list[str], beyond: int = 0) -> tuple[str, str | None]:
    """The plain meaning: look at ever longer beginnings of the text, of more characters than ``beyond``, until one ends
    with a stop string."""
    for end in range(beyond + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="ab.", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=3),
    first=st.integers(0, 12),
)
@settings(few, max_examples=500)
def test_stop_matching_does_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: list[str], first: int) -> None:
    """None ends in the ``first`` pieces; one that begins there may end after them, as in vLLM."""
    matcher = StopMatcher(stops)
    visible, expected = "", first_stop("".join(pieces), stops, len("".join(pieces[:first])))
    for at, piece in enumerate(pieces):
        visible += matcher.push(piece, may_end=at >= first)
        assert expected[0].startswith(visible)
    visible += matcher.flush()
    assert (visible, matcher.matched) == expected


@given(
    pieces=st.lists(st.tuples(st.text(alphabet="ab<>", max_size=3), st.booleans()), max_size=12),
    stops=st.lists(st.text(alphabet="ab<>", min_size=1, max_size=4), min_size=1, max_size=3),
)
@few
def test_text_that_is_not_shown_is_matched_all_the_same(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(text, unseen=unseen) for text, unseen in pieces) + matcher.flush()
    until, matched = first_stop("".join(text for text, _ in pieces), stops)
    seen = "".join("_" * len(text) if unseen else text for text, unseen in pieces)[: len(until)]
    assert (shown, matcher.matched) == (seen.replace("_", ""), matched)


def test_held_text_is_only_what_could_begin_a_stop() -> None:
    matcher = StopMatcher(["\n\nclass", "END"])
    assert matcher.push("x = 1\n") == "x = 1"
    assert matcher.push("y = 2 E") == "\ny = 2 "
    assert matcher.push("N") == ""
    assert matcher.push("D of") == ""
    assert matcher.matched == "END"
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@given(text=texts, stops=st.lists(st.text(alphabet="thelo .é你", min_size=1, max_size=3), min_size=1, max_size=3))
@few
def test_a_stream_keeps_the_tokens_up_to_the_one_that_completes_the_stop(text: str, stops: list[str]) -> None:
    tokenizer = small_tokenizers.byte_level()
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, stops)
    shown = "".join(stream.push(token) for token in ids) + stream.finish()
    expected, matched = first_stop(text, stops)
    assert shown == stream.text == expected
    assert stream.stopped == (matched is not None)
    if matched is None:
        assert stream.kept == len(ids)
        return
    assert matched in tokenizer.decode(ids[: stream.kept])
    assert first_stop(tokenizer.decode(ids[: stream.kept - 1]).rstrip("\ufffd"), stops)[1] is None


def test_tokens_after_a_stop_are_ignored() -> None:
    tokenizer = small_tokenizers.byte_level()
    ids = tokenizer.encode("the dog. the fox")
    stream = TextStream(tokenizer, ["."])
    assert "".join(map(stream.push, ids)) == "the dog"
    assert stream.finish() == ""
    assert tokenizer.decode(ids[: stream.kept]) == "the dog."


def test_min_tokens_keep_a_stop_string_from_counting() -> None:
    tokenizer = small_tokenizers.byte_level()
    ids = [tokenizer.encode(letter)[0] for letter in "x.y.z.w"]
    stream = TextStream(tokenizer, ["."], min_tokens=2)
    assert "".join(map(stream.push, ids)) + stream.finish() == "x.y"
    assert stream.kept == 4


def test_a_stop_string_may_straddle_the_end_of_min_tokens() -> None:
    tokenizer = small_tokenizers.byte_level()
    ids = [tokenizer.encode(letter)[0] for letter in "abHALTc"]
    for min_tokens, expected in ((0, "ab"), (3, "ab"), (5, "ab"), (6, "abHALTc")):
        stream = TextStream(tokenizer, ["HALT"], min_tokens)
        shown = [stream.push(token) for token in ids]
        assert "".join(shown) + stream.finish() == expected, min_tokens
        assert shown[2] == "", "what may begin a stop string is held back among the first tokens, too"
        assert stream.kept == (6 if expected == "ab" else 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_may_name_a_special_token(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    special, name = min(tokenizer.silent_ids.items())
    ids = [
        *tokenizer.encode("the", add_special_tokens=False),
        special,
        *tokenizer.encode("a", add_special_tokens=False),
    ]
    for stop, shown in (([name], "the"), (["x", f"he{name}"], "t"), ([f"{name}b"], None), ([name[:-1]], None)):
        stream = TextStream(tokenizer, stop)
        text = "".join(map(stream.push, ids)) + stream.finish()
        assert text == (tokenizer.decode(ids) if shown is None else shown), stop
        assert stream.stopped == (shown is not None)
    late = TextStream(tokenizer, [name], min_tokens=len(ids))
    assert "".join(map(late.push, ids)) + late.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_marks_are_text_by_their_name(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    (first, name), (second, _) = sorted(tokenizer.silent_ids.items())[:2]
    the = tokenizer.encode("the", add_special_tokens=False)
    ids = [*the, first, *the, second, *the]
    plain = tokenizer.decode(ids)
    shown = TextStream(tokenizer, ["never"], marks=[name])
    after = plain[len(tokenizer.decode(the)) :]
    assert "".join(map(shown.push, ids)) + shown.finish() == f"the{name}{after}"
    stopped = TextStream(tokenizer, [f"e{name}"], marks=[name])
    assert "".join(map(stopped.push, ids)) + stopped.finish() == "th"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_s_own_text_and_bytes(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    for token in range(tokenizer.vocab_size):
        own, text = tokenizer.own_bytes(token), tokenizer.own_text(token)
        assert own.decode("utf-8", "replace") == text
        assert token not in tokenizer.silent_ids or not own
    ids = tokenizer.encode(" the 世界", add_special_tokens=False)
    assert b"".join(map(tokenizer.own_bytes, ids)).decode().strip() == "the 世界"
    assert tokenizer.own_text(tokenizer.encode("a the", add_special_tokens=False)[-1]).startswith(" t")
