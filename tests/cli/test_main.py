"""The command line as a whole: it names its commands, teaches, and turns the user's mistakes into one paragraph."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from benthic import __version__
from benthic.cli import build_app, run_app
from benthic.common.errors import ConfigError


def test_help_names_every_command() -> None:
    output = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "200"}).output
    for name in ("serve", "generate", "bench", "simulate", "cache", "doctor"):
        assert name in output


def test_version() -> None:
    assert CliRunner().invoke(build_app(), ["--version"]).output.strip() == f"benthic {__version__}"


def test_the_help_of_serve_teaches() -> None:
    output = CliRunner().invoke(build_app(), ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for words in ("Example: benthic serve", "--port", "--max-context", "--config", "SIGTERM", "--cp N", "torchrun"):
        assert words in output


def test_an_error_is_one_paragraph_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise ConfigError("--x 3: [bold] must be at least 4")

    monkeypatch.setattr(sys, "argv", ["benthic"])
    with pytest.raises(SystemExit) as end:
        run_app(app)
    assert end.value.code == 1
    assert capsys.readouterr().err == "benthic: --x 3: [bold] must be at least 4\n"


def test_the_command_line_and_the_server_load_no_torch() -> None:
    code = (
        "import sys, benthic.cli, benthic.server.lifecycle as l, benthic.server.loading as s;"
        "s.load_text(s.find_model('smollm2-135m'));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
