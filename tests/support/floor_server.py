"""`python -m tests.support.floor_server [--rules FILE] SERVE-ARGUMENTS`: the real server and engine for the tiny
checkpoint, which has no tokenizer: a token is a byte. `--rules` puts a faulty disk under the engine, `--unreadable-on
RANK` weights that can't be read under one rank, `--sleepy "ARGUMENTS"` workers that sleep (`sleepy_engine`)."""

import sys
from typing import Any

import typer

from benthic.cli import run_app
from benthic.cli.options import with_options
from benthic.cli.serve import start
from benthic.messages.start import ModelSource
from benthic.server.context import TextSide
from benthic.server.engine_process import ENGINE_COMMAND
from benthic.server.lifecycle import Parts
from benthic.server.tokenize import Tokenizing
from benthic.text.token_bytes import TokenBytes
from benthic.weights.model_config import GenerationDefaults
from tests.support.tiny_text import END, START, TinyText


def hexadecimal() -> TinyText:
    """Bytes in, their two digits out: two answers read alike only if they are the same tokens."""
    text = TinyText()
    text.token_bytes = TokenBytes([b"%02x " % b for b in range(256)] + [b"<end>", b"<start>"], {END, START})
    return text


def load(source: ModelSource) -> TextSide:
    """In place of the tokenizer that the checkpoint does not have."""
    return TextSide(tokenizing=Tokenizing(hexadecimal()), defaults=GenerationDefaults(eos_token_ids=(END,)))


def run() -> None:
    arguments = sys.argv[1:]
    command = ENGINE_COMMAND
    if arguments[:1] == ["--rules"]:
        command = (sys.executable, "-m", "tests.support.faulty_engine", arguments[1])
        arguments = arguments[2:]
    if arguments[:1] == ["--unreadable-on"]:
        command = (sys.executable, "-m", "tests.support.rank_fault", arguments[1])
        arguments = arguments[2:]
    if arguments[:1] == ["--sleepy"]:
        command = (sys.executable, "-m", "tests.support.sleepy_engine", *arguments[1].split())
        arguments = arguments[2:]
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @with_options(server=True)
    def serve(options: Any) -> None:
        start(options, Parts(engine_command=command, load_text=load))

    sys.argv = ["benthic", *arguments]
    run_app(app)


if __name__ == "__main__":
    run()
