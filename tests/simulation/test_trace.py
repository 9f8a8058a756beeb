"""Reading traces: what is taken, and how a bad line is refused."""

import json
from pathlib import Path

import pytest

from benthic.common.errors import ConfigError
from benthic.simulation import read_trace


def line(**changes: object) -> str:
    return json.dumps({"timestamp": 5, "input_length": 1000, "output_length": 3, "hash_ids": [7, 8], **changes})


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_requests_come_by_arrival_and_begin_at_zero(tmp_path: Path) -> None:
    later, first = line(timestamp=2500.5), line(timestamp=1000, output_length=9)
    trace = read_trace(written(tmp_path, later, "", first), 512)
    assert [(r.arrival_us, r.output_tokens) for r in trace.requests] == [(0, 9), (1_500_500, 3)]
    assert trace.requests[0].input_tokens == 1000
    assert trace.num_pages == 4
    assert trace.unique_by_position == (1, 1)


def test_equal_hashes_mean_equal_prefixes(tmp_path: Path) -> None:
    lines = [line(hash_ids=ids) for ids in ([7, 8], [7, 9], [9, 8])]
    a, b, c = (request.hashes for request in read_trace(written(tmp_path, *lines), 512).requests)
    assert a[0] == b[0]
    assert len({a[0], a[1], b[1], c[0], c[1]}) == 5
    assert {len(page) for page in (*a, *b, *c)} == {32}


def test_other_fields_are_passed_over(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, line(chat_id=4)), 512).requests) == 1


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, line(), line(), "{"), 512, limit=2).requests) == 2


def test_a_tail_shorter_than_a_page_may_have_an_id_or_none(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, line(hash_ids=[7])), 512).num_pages == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "truncated"),
        ("[1]", "object"),
        (line(timestamp="x"), "timestamp"),
        (line(timestamp=-1), "timestamp"),
        (line(input_length=0), "input_length"),
        (line(output_length=1.5), "output_length"),
        (line(hash_ids=[7, -8]), "hash_ids"),
        (line(hash_ids=None), "hash_ids"),
        ('{"timestamp": 1}', "input_length"),
        (line(hash_ids=[1, 2, 3]), "expected 2 at 512 tokens"),
        (line(hash_ids=[]), "--page-tokens"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path: Path, bad: str, words: str) -> None:
    with pytest.raises(ConfigError, match="line 3") as error:
        read_trace(written(tmp_path, line(), line(), bad), 512)
    assert words in str(error.value)
    assert "expected" in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_trace(path, 512)


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_no_request_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no request in it"):
        read_trace(path, 512)


def test_a_file_that_is_not_there_or_is_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=r"--trace .*can't be read"):
            read_trace(path, 512)
