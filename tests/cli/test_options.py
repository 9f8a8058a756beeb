"""One `Options` object out of flags and a config file."""

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from benthic.cli.options import with_options
from benthic.config import OPTIONS


def command_line(server: bool) -> tuple[typer.Typer, list[Any]]:
    """An app with one command, and the list that receives what the command was called with."""
    app, seen = typer.Typer(), []

    @app.command()
    @with_options(server=server)
    def command(options: Any, extra: Annotated[int, typer.Option("--extra")] = 3) -> None:
        """Does nothing."""
        seen.append((options, extra))

    return app, seen


def test_flags_arrive_typed_and_what_nobody_gave_is_none() -> None:
    app, seen = command_line(server=True)
    result = CliRunner().invoke(
        app, ["some/model", "--port", "81", "--grace-s", "2.5", "--l1-size", "2GiB", "--extra", "5"]
    )
    assert result.exit_code == 0, result.output
    options, extra = seen[0]
    assert (options.model, options.port, options.grace_s, options.l1_size, extra) == ("some/model", 81, 2.5, "2GiB", 5)
    given = {"port", "grace_s", "l1_size"}
    assert all(getattr(options, o.name) is None for o in OPTIONS if o.name not in given)


def test_flags_win_over_the_config_file(tmp_path: Path) -> None:
    app, seen = command_line(server=False)
    file = tmp_path / "benthic.toml"
    file.write_text('model = "from-file"\npage-size = 16\nseed = 4\nport = 9000\n')
    result = CliRunner().invoke(app, ["--config", str(file), "--seed", "7"])
    assert result.exit_code == 0, result.output
    options, extra = seen[0]
    assert (options.model, options.page_size, options.seed, options.port, extra) == ("from-file", 16, 7, 9000, 3)


def test_help_shows_groups_and_an_example_of_each_option() -> None:
    app, _ = command_line(server=True)
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    for option in OPTIONS:
        assert option.group in output
        assert f"E.g. {option.usage}" in output


def test_server_options_are_refused_where_there_is_no_server() -> None:
    app, seen = command_line(server=False)
    assert CliRunner().invoke(app, ["--port", "81"]).exit_code == 2
    assert seen == []


def test_a_wrong_number_names_the_flag() -> None:
    app, _ = command_line(server=False)
    result = CliRunner().invoke(app, ["--page-size", "many"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "--page-size" in result.output


@pytest.mark.parametrize(("flags", "expected"), [([], None), (["--ep"], True), (["--no-ep"], False)])
def test_a_flag_without_a_value_is_given_or_not(flags: list[str], expected: bool | None) -> None:
    app, seen = command_line(server=False)
    assert CliRunner().invoke(app, flags).exit_code == 0
    assert seen[0][0].ep is expected


def test_a_flag_that_says_no_wins_over_the_file(tmp_path: Path) -> None:
    app, seen = command_line(server=False)
    file = tmp_path / "benthic.toml"
    file.write_text("cp = 2\nep = true\n")
    for flags, expected in (([], True), (["--no-ep"], False)):
        assert CliRunner().invoke(app, ["--config", str(file), *flags]).exit_code == 0
        assert (seen[-1][0].cp, seen[-1][0].ep) == (2, expected)
