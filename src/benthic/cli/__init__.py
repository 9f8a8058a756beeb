"""The command line: one file a command. A command's module has `register(app)`; add it to COMMANDS."""

import signal
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from benthic.cli import bench, cache, doctor, generate, serve, simulate
from benthic.common.errors import BenthicError
from benthic.common.version import __version__

COMMANDS = (serve, generate, bench, cache, simulate, doctor)

_HELP = """An LLM serving engine for long prompts, whose KV cache finds every prefix that was computed before.

Start here: `benthic serve` and, from another terminal, the curl line that it prints. `benthic doctor` says what this
machine offers. Every command explains itself with --help."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"benthic {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The application with every command."""
    app = typer.Typer(
        name="benthic", help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip

    @app.callback()
    def common(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_show_version)
        ] = False,
    ) -> None:
        pass

    for command in COMMANDS:
        command.register(app)
    return app


def run_app(app: typer.Typer) -> None:
    """Run the command line. An error that is the user's or the machine's is one paragraph and exit code 1."""
    try:
        app()
    except BenthicError as error:
        Console(stderr=True).print(Text(f"benthic: {error}"), soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def main() -> None:
    """Entry point of `benthic`."""
    run_app(build_app())
