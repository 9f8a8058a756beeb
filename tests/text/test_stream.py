"""Text leaves in pieces that join to the text of the whole, and stop strings never leak."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from benthic.text.stream import Detokenizer, StopFinder
from benthic.text.token_bytes import TokenBytes

BYTES = TokenBytes([bytes([b]) for b in range(256)] + [b"<end>"], {256})


def naive_cut(text: str, stops: Sequence[str], include: bool) -> str:
    """Read one character after another; at the first that ends a stop, cut (before the longest stop that ends
    there)."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[:end] if include else text[: end - max(len(stop) for stop in hits)]
    return text


def cut_in_pieces(pieces: Sequence[str], stops: Sequence[str], include: bool) -> list[str]:
    finder = StopFinder(stops, include=include)
    sent = []
    for piece in pieces:
        found = finder.push(piece)
        sent.append(found.text)
        if found.stopped:
            return sent
    return [*sent, finder.flush()]


@st.composite
def pieces_and_stops(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    letters = st.text(alphabet="ab😀", max_size=6)
    return draw(st.lists(letters, max_size=8)), draw(st.lists(letters.filter(bool), min_size=1, max_size=3))


@given(pieces_and_stops(), st.booleans())
def test_any_cutting_gives_what_a_scan_of_the_characters_gives(
    case: tuple[list[str], list[str]], include: bool
) -> None:
    pieces, stops = case
    assert "".join(cut_in_pieces(pieces, stops, include)) == naive_cut("".join(pieces), stops, include)


@given(pieces_and_stops())
def test_what_was_sent_is_always_a_prefix_of_the_final_text(case: tuple[list[str], list[str]]) -> None:
    pieces, stops = case
    final, sent = naive_cut("".join(pieces), stops, False), ""
    for piece in cut_in_pieces(pieces, stops, False):
        sent += piece
        assert final.startswith(sent)


def test_a_stop_that_overlaps_itself_and_a_near_miss() -> None:
    assert cut_in_pieces(["aa", "b", "aa", "c rest"], ["aac"], False) == ["", "aab", "", ""]
    assert "".join(cut_in_pieces(["the en", "d of th", "e"], ["the end."], False)) == "the end of the"


def test_long_stop_in_single_characters() -> None:
    stop = "x" * 199 + "y"
    text = "x" * 500 + "y tail"
    assert "".join(cut_in_pieces(list(text), [stop], False)) == "x" * 301


@given(st.lists(st.integers(0, 256), max_size=40))
def test_pieces_join_to_the_decode_of_everything(tokens: list[int]) -> None:
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == BYTES.join(tokens, skip_special=True).decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_no_replacement_mark_for_real_text(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push(token) for token in text.encode()]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_special_tokens_are_hidden_or_shown() -> None:
    assert Detokenizer(BYTES).push(256) == ""
    assert Detokenizer(BYTES, skip_special=False).push(256) == "<end>"


def test_a_half_character_becomes_one_mark_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(token) for token in "😀".encode()[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_leading_space_is_stripped_once_where_the_decoder_does() -> None:
    table = TokenBytes([b" a", b" b", b" "], set(), strip_start=1)
    chat = Detokenizer(table, strip_start=True)
    assert [chat.push(2), chat.push(0), chat.push(1)] == ["", " a", " b"]
    assert Detokenizer(table).push(0) == " a"
