"""What the server process reads of the model itself: where it is, its tokenizer and its sampling defaults. No
weights, no torch."""

from pathlib import Path

from benthic.messages.start import ModelSource
from benthic.server.context import TextSide
from benthic.server.tokenize import Tokenizing
from benthic.weights.locate import Source, locate
from benthic.weights.model_config import read_config, read_generation_defaults


def find_model(written: str) -> ModelSource:
    """The files of the model that the user named; a hub id is downloaded. Raises ModelError, for its config too."""
    source = locate(written)
    read_config(source)  # an unknown architecture is refused here, before the engine starts
    return ModelSource(source.kind, Path(source.path).absolute(), source.written)


def load_text(source: ModelSource) -> TextSide:
    """Tokenizer, chat template and sampling defaults. Raises ModelError."""
    # imported here, after the port is bound and the engine started: these take more than a second
    from benthic.text.text_model import CheckpointText
    from benthic.weights.tokenizer import load_tokenizer

    where = Source(source.kind, source.path, source.written)
    return TextSide(
        tokenizing=Tokenizing(CheckpointText(load_tokenizer(where))), defaults=read_generation_defaults(where)
    )
