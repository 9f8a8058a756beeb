"""Content hashes: the chain by its definition, salts and namespaces apart, suffixes of bigrams as they were stored."""

import hashlib
import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.kvcache.hashing import BIGRAM_BYTES, bigrams, extend, page_hashes, root_hash

tokens = st.lists(st.integers(min_value=0, max_value=2**31 - 1), max_size=40)


def ids_of(values: list[int]) -> "array[int]":
    return array("i", values)


@given(tokens, st.integers(min_value=1, max_value=9))
def test_each_hash_is_the_sha256_of_the_one_before_and_the_pages_tokens(values: list[int], page_size: int) -> None:
    root = root_hash(b"namespace", "salt")
    prev, expected = root, []
    for page in range(len(values) // page_size):
        text = b"".join(t.to_bytes(4, "little") for t in values[page * page_size : (page + 1) * page_size])
        prev = hashlib.sha256(prev + text).digest()
        expected.append(prev)
    assert page_hashes(root, ids_of(values).tobytes(), page_size) == expected


@given(tokens, st.integers(min_value=1, max_value=9), st.integers(min_value=0, max_value=10))
def test_the_chain_goes_on_from_any_page(values: list[int], page_size: int, pages: int) -> None:
    root = root_hash(b"namespace", None)
    data = ids_of(values).tobytes()
    whole = page_hashes(root, data, page_size)
    done = min(pages, len(whole))
    rest = memoryview(data)[done * page_size * 4 :]
    middle = whole[done - 1] if done else root
    assert page_hashes(middle, rest, page_size) == whole[done:]
    if done < len(whole):
        assert extend(middle, rest[: page_size * 4]) == whole[done]


def test_the_root_depends_on_namespace_and_salt() -> None:
    assert root_hash(b"n", None) == hashlib.sha256(b"n").digest()
    assert root_hash(b"n", "é") == hashlib.sha256("né".encode()).digest()
    assert len({root_hash(b"n", None), root_hash(b"n", "a"), root_hash(b"n", "b"), root_hash(b"m", "a")}) == 4


@given(tokens, st.integers(min_value=0, max_value=50))
def test_bigrams_of_a_suffix_are_the_suffix_of_the_bigrams(values: list[int], start: int) -> None:
    ids = ids_of(values)
    assert bigrams(ids[start:]) == bigrams(ids)[start:]


@given(tokens)
def test_a_bigram_holds_a_token_and_the_next(values: list[int]) -> None:
    pairs = bigrams(ids_of(values))
    assert [(p & 0xFFFFFFFF, p >> 32) for p in pairs] == list(itertools.pairwise(values))


@given(tokens, st.integers(min_value=1, max_value=5), st.integers(min_value=0, max_value=6))
def test_a_suffix_of_bigrams_hashes_as_it_was_stored(values: list[int], page_size: int, pages: int) -> None:
    ids, root = ids_of(values), root_hash(b"n", None)
    whole = page_hashes(root, bigrams(ids).tobytes(), page_size, token_bytes=BIGRAM_BYTES)
    done = min(pages, len(whole))
    suffix = bigrams(ids[done * page_size :]).tobytes()
    middle = whole[done - 1] if done else root
    assert page_hashes(middle, suffix, page_size, token_bytes=BIGRAM_BYTES) == whole[done:]


def test_a_page_of_bigrams_depends_on_the_token_after_it() -> None:
    def first_page(last: int) -> bytes:
        return page_hashes(b"", bigrams(ids_of([1, 2, last])).tobytes(), 2, token_bytes=BIGRAM_BYTES)[0]

    assert first_page(3) != first_page(4)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes"):
        page_hashes(b"", bytes(7), 1)
    with pytest.raises(ValueError, match="page size"):
        page_hashes(b"", bytes(8), 0)
    with pytest.raises(ValueError, match="4-byte"):
        bigrams(array("q", [1, 2]))
