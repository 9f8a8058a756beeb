"""A choice's pieces: logprobs travel with the text of their token, and give no stop string away."""

from hypothesis import given
from hypothesis import strategies as st

from benthic.messages import Logprobs
from benthic.text.choice import Choice, Entry, Piece, TextRules
from tests.support.tiny_text import END, TinyText

TABLE = TinyText().token_bytes


def rules(*stops: str, include: bool = False, min_tokens: int = 0) -> TextRules:
    return TextRules(
        stops=stops,
        include_stop=include,
        skip_special=True,
        strip_start=False,
        end_tokens=frozenset({END}),
        min_tokens=min_tokens,
    )


def logprobs(tokens: list[int]) -> list[Logprobs]:
    return [Logprobs(token, -1.0, (), ()) for token in tokens]


def run(tokens: list[int], how: TextRules, sizes: list[int] | None = None) -> tuple[Choice, list[Piece]]:
    choice, pieces, at = Choice.open(0, how, TABLE), [], 0
    for size in sizes or [1] * len(tokens):
        part = tokens[at : at + size]
        choice.push(part, logprobs(part))
        at += size
        piece = choice.take()
        if piece is not None:
            pieces.append(piece)
        if choice.finish:
            return choice, pieces
    choice.push(tokens[at:], logprobs(tokens[at:]))
    choice.end("stop" if tokens and tokens[-1] == END else "length")
    last = choice.take()
    assert last is not None
    return choice, [*pieces, last]


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def entries(pieces: list[Piece]) -> list[Entry]:
    return [entry for piece in pieces for entry in piece.entries]


@given(
    st.text(alphabet="ab😀é", max_size=20),
    st.lists(st.integers(1, 5), max_size=20),
    st.sampled_from(["ba", "b😀", "é"]),
)
def test_any_grouping_of_tokens_gives_the_same_answer(answer: str, sizes: list[int], stop: str) -> None:
    tokens = list(answer.encode())
    one, grouped = run(tokens, rules(stop)), run(tokens, rules(stop), sizes)
    assert text(grouped[1]) == text(one[1]) == answer.split(stop)[0]
    assert grouped[0].num_tokens == one[0].num_tokens
    assert entries(grouped[1]) == entries(one[1])


@given(st.text(alphabet="ab😀é", max_size=20))
def test_bytes_of_the_logprobs_are_the_text_and_come_no_earlier(answer: str) -> None:
    _, pieces = run(list(answer.encode()), rules("zz"))
    assert b"".join(entry.data for entry in entries(pieces)) == answer.encode()
    sent = ""
    for piece in pieces:
        sent += piece.text
        assert all(entry.offset < len(sent) for entry in piece.entries)


def test_logprobs_of_a_stop_string_are_not_sent() -> None:
    choice, pieces = run(list(b"one STOP two"), rules("STOP"))
    assert (text(pieces), choice.finish, choice.num_tokens) == ("one ", "stop", 8)
    assert b"".join(entry.data for entry in entries(pieces)) == b"one "


def test_the_end_token_counts_and_shows_no_bytes() -> None:
    choice, pieces = run([*b"hi", END], rules())
    assert (text(pieces), choice.num_tokens, choice.finish) == ("hi", 3, "stop")
    assert [entry.data for entry in entries(pieces)] == [b"h", b"i", b""]


def test_include_stop_keeps_it_and_what_follows_is_dropped() -> None:
    choice, pieces = run(list(b"ab.cd"), rules(".", include=True), [5])
    assert (text(pieces), choice.num_tokens) == ("ab.", 3)


def test_no_stop_string_before_min_tokens() -> None:
    choice, pieces = run(list(b"a.b.c"), rules(".", min_tokens=3))
    assert (text(pieces), choice.num_tokens) == ("a.b", 4)


def test_one_finish_reason_in_the_last_piece() -> None:
    _, pieces = run(list(b"abc"), rules())
    assert [piece.finish for piece in pieces] == [None, None, None, "length"]
