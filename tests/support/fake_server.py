"""`python -m tests.support.fake_server [--start-token] [--beat-s S] SERVE-FLAGS -- FAKE-ENGINE-FLAGS`: the real server
process over the fake engine, through the seam that the lifecycle offers."""

import sys
from pathlib import Path
from typing import Any

import typer

from benthic.cli import run_app
from benthic.cli.options import with_options
from benthic.cli.serve import start
from benthic.messages.start import ModelSource
from benthic.server.context import TextSide
from benthic.server.lifecycle import Parts
from benthic.server.liveness import Bounds
from benthic.server.tokenize import Tokenizing
from benthic.weights.model_config import GenerationDefaults
from tests.support.tiny_text import END, TinyText


def run() -> None:
    arguments = sys.argv[1:]
    split = arguments.index("--")
    own, engine = arguments[:split], arguments[split + 1 :]
    beat_s = float(own.pop(own.index("--beat-s") + 1)) if "--beat-s" in own else 10.0
    start_token = "--start-token" in own
    flags = [flag for flag in own if flag not in ("--beat-s", "--start-token")]

    def load(source: ModelSource) -> TextSide:
        text = TinyText(start_token=start_token)
        return TextSide(tokenizing=Tokenizing(text), defaults=GenerationDefaults(eos_token_ids=(END,)))

    parts = Parts(
        engine_command=(sys.executable, "-m", "tests.support.fake_engine", *engine),
        bounds=Bounds(beat_s=beat_s),
        find_model=lambda written: ModelSource("gguf", Path("/nowhere"), written),
        load_text=load,
    )

    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @with_options(server=True)
    def serve(options: Any) -> None:
        start(options, parts)

    sys.argv = ["benthic", "tiny", *flags]
    run_app(app)


if __name__ == "__main__":
    run()
