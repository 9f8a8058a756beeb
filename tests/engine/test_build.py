"""What is settled before the weights load."""

import pytest

from benthic.common.errors import CapacityError
from benthic.config import options_from_mapping, resolve
from benthic.engine import build
from benthic.weights.locate import locate


@pytest.mark.parametrize("option", [{"l1_size": "90000GiB"}, {"l1_pages": 1 << 40}])
def test_an_l1_that_cannot_fit_is_refused_before_the_weights_load(
    option: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*_: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(build, "load_model", load_model)
    config = resolve(options_from_mapping({"device": "cpu", **option}, "test")).engine
    with pytest.raises(CapacityError, match="lower --l1-pages or --l1-size"):
        build.build_engine(config, locate(config.model.model))
