from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ktc.engine.stream import Detokenizer, StopMatcher
from tests.engine.conftest import make_tokenizer

TOKENIZER = make_tokenizer()


def byte_ids(text: str) -> list[int]:
    """One id per UTF-8 byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    characters = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [TOKENIZER.convert_tokens_to_ids(c) for piece, _ in characters for c in piece]


@settings(deadline=None, max_examples=150)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30))
def test_t4_pieces_are_valid_utf8_and_join_to_the_text(text: str) -> None:
    # failure T4: a character split over tokens was printed as replacement characters
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add(i) for i in byte_ids(text)] + [detokenizer.finish()]
    assert "".join(pieces) == text
    for piece in pieces:
        piece.encode("utf-8")
        assert "\ufffd" not in piece


def test_t4_a_character_comes_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.add(i) for i in byte_ids("a🙂b")] == ["a", "", "", "", "🙂", "b"]


def test_t4_a_character_cut_off_by_the_end_is_dropped() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join(detokenizer.add(i) for i in byte_ids("a🙂")[:-1]) + detokenizer.finish() == "a"


def test_t4_bytes_that_are_no_text_do_not_hold_the_stream_for_ever() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    stray = byte_ids("é")[1]  # a continuation byte without its first
    held = [detokenizer.add(stray) for _ in range(40)]
    assert any(held) and "".join(held).strip("\ufffd") == ""
    assert detokenizer.add(byte_ids("x")[0]).endswith("x")


def test_spaces_between_words_survive() -> None:
    text = "the quick  brown fox\n\n the lazy dog"
    detokenizer = Detokenizer(TOKENIZER)
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert "".join([detokenizer.add(i) for i in ids] + [detokenizer.finish()]) == text


def test_special_tokens_are_not_text() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.add(TOKENIZER.eos_token_id) == ""


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_where_plain_search_cuts(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join([*(matcher.add(p) for p in pieces), matcher.finish()])
    text = "".join(pieces)
    found = [at for s in stops if (at := text.find(s)) >= 0]
    if not found:
        assert shown == text and matcher.hit is None
    else:
        # the stream decides as soon as one stop string is complete
        assert matcher.hit in stops and text.startswith(shown)
        assert text[len(shown) :].startswith(matcher.hit)
        assert all(s not in shown for s in stops)


def test_a_stop_string_across_tokens_is_not_shown() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.add("Hello\n") == "Hello"
    assert matcher.add("Us") == ""
    assert matcher.add("er: hi") == ""
    assert matcher.hit == "\nUser:" and matcher.finish() == ""
