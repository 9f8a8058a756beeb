"""`python -m tests.support.fake_server [--start-token] [--beat-s S] [--follow-s S] SERVE-FLAGS -- FAKE-ENGINE-FLAGS`:
the real server process over the fake engine, through the seam that the lifecycle offers."""

import os
import sys
from pathlib import Path
from typing import Any

import typer

from benthic.cli import run_app
from benthic.cli.options import with_options
from benthic.cli.serve import start
from benthic.messages.start import EngineStart, ModelSource
from benthic.server.context import TextSide
from benthic.server.lifecycle import Parts
from benthic.server.liveness import Bounds
from benthic.server.tokenize import Tokenizing
from benthic.weights.model_config import GenerationDefaults
from tests.support import fake_engine
from tests.support.tiny_text import END, TinyText


def take(arguments: list[str], flag: str, default: float) -> float:
    """Remove `flag` and its number from the arguments, and give the number."""
    if flag not in arguments:
        return default
    at = arguments.index(flag)
    value = float(arguments[at + 1])
    del arguments[at : at + 2]
    return value


def run() -> None:
    arguments = sys.argv[1:]
    split = arguments.index("--")
    own, engine = arguments[:split], arguments[split + 1 :]
    bounds = Bounds(beat_s=take(own, "--beat-s", 10.0), follow_s=take(own, "--follow-s", 12.0))
    start_token = "--start-token" in own
    flags = [flag for flag in own if flag != "--start-token"]

    def load(source: ModelSource) -> TextSide:
        text = TinyText(start_token=start_token)
        return TextSide(tokenizing=Tokenizing(text), defaults=GenerationDefaults(eos_token_ids=(END,)))

    def follow(order: EngineStart) -> int:
        os._exit(fake_engine.run(order, fake_engine.parse(engine)))  # without waiting for its threads

    parts = Parts(
        engine_command=(sys.executable, "-m", "tests.support.fake_engine", *engine),
        bounds=bounds,
        find_model=lambda written: ModelSource("gguf", Path("/nowhere"), written),
        load_text=load,
    )

    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @with_options(server=True)
    def serve(options: Any) -> None:
        start(options, parts, follow)

    sys.argv = ["benthic", "tiny", *flags]
    run_app(app)


if __name__ == "__main__":
    run()
