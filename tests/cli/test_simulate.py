"""`benthic simulate` from its flags to the table, the JSON and the plot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benthic.cli import build_app
from benthic.common.errors import ConfigError

REAL = Path(__file__).parents[1] / "data" / "traces" / "conversation_first_300.jsonl"
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str | Path) -> str:
    """The command's output. Raises what it raised."""
    result = CliRunner().invoke(build_app(), ["simulate", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.output


def test_json_says_what_was_found_and_where_the_plot_is(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    answer = json.loads(run("--trace", REAL, "--plot", plot, "--json"))
    seen: set[int] = set()
    found = total = 0
    for line in REAL.read_text().splitlines():
        ids = json.loads(line)["hash_ids"]
        found += sum(i in seen for i in ids)
        total += len(ids)
        seen.update(ids)
    assert answer["hit_share"] == found / total
    assert answer["input_pages"] == total
    assert answer["requests"] == 300
    assert answer["sizes"] == {"l1": "no limit", "l2": "no limit", "l3": "no limit"}
    assert answer["plot"] == str(plot)
    assert plot.read_bytes().startswith(PNG)


def test_the_table_and_sizes(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    output = run(
        "--trace", REAL, "--plot", plot, "--l1-pages", "600", "--l2-pages", "1200", "--l3-pages", "1000",
        "--l2-policy", "write-through", "--owners", "2",
    )  # fmt: skip
    for words in ("tier", "evicted pages", "L1", "1,200", "1,000", "300 requests", "CPU time in the core", str(plot)):
        assert words in output
    assert plot.read_bytes().startswith(PNG)


def test_sizes_in_json_are_numbers_and_0_is_off() -> None:
    answer = json.loads(run("--trace", REAL, "--l1-pages", "6000", "--l2-pages", "0", "--no-plot", "--json"))
    assert answer["sizes"] == {"l1": 6000, "l2": "off", "l3": "off"}
    assert answer["plot"] is None


def test_the_plot_goes_to_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("--trace", REAL, "--limit", "20")
    assert (tmp_path / "simulate.png").read_bytes().startswith(PNG)
    (tmp_path / "simulate.png").unlink()
    run("--trace", REAL, "--limit", "20", "--no-plot")
    assert list(tmp_path.iterdir()) == []


def test_what_can_not_be_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("not json\n")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    cases: tuple[tuple[list[str | Path], str], ...] = (
        (["--trace", tmp_path / "none.jsonl"], "can't be read"),
        (["--trace", bad], "line 1"),
        (["--trace", empty], "no request in it"),
        (["--trace", REAL, "--l1-pages", "0"], "--l1-pages 0"),
        (["--trace", REAL, "--l2-pages", "0", "--l3-pages", "5"], "needs a host tier"),
        (["--trace", REAL, "--limit", "0"], "--limit 0"),
        (["--trace", REAL, "--page-bytes", "x"], "--page-bytes"),
        (["--trace", REAL, "--page-tokens", "64"], "--page-tokens says how many"),
        (["--trace", REAL, "--limit", "5", "--plot", tmp_path / "no" / "plot.png"], "there is no folder"),
        (["--trace", REAL, "--limit", "5", "--plot", tmp_path], "can't be written"),
    )
    for arguments, words in cases:
        with pytest.raises(ConfigError) as error:
            run(*arguments)
        assert words in str(error.value)


def test_a_replay_loads_no_torch_and_no_plot_no_matplotlib() -> None:
    code = (
        "import sys; from benthic.cli import build_app;"
        f"build_app()(['simulate', '--trace', {str(REAL)!r}, '--limit', '9', '--no-plot'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
