"""Upload and read-back: values, shapes and types survive; the caller's arrays stay its own."""

import numpy as np
import torch

from benthic.runner.copy_out import CopyOut
from benthic.runner.staging import Staging

CPU = torch.device("cpu")


def test_arrays_of_any_shape_and_type_arrive() -> None:
    arrays = {
        "a": np.arange(5, dtype=np.int32),
        "none": np.zeros((0, 7), dtype=np.float32),
        "b": np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
        "c": np.array(2.5, dtype=np.float32).reshape(1, 1),
    }
    tensors = Staging(CPU).upload(arrays)
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert np.array_equal(tensors[name].numpy(), array)
        assert tensors[name].numpy().dtype == array.dtype
        assert tensors[name].data_ptr() % 16 == 0 or array.size == 0


def test_uploads_are_copies() -> None:
    staging, array = Staging(CPU), np.zeros(3, dtype=np.int64)
    first = staging.upload({"x": array})["x"]
    array[:] = 1
    second = staging.upload({"x": array})["x"]
    assert first.tolist() == [0, 0, 0]
    assert second.tolist() == [1, 1, 1]


def test_nothing_to_upload_is_fine() -> None:
    assert Staging(CPU).upload({}) == {}


def test_read_back_keeps_what_was_there_when_it_started() -> None:
    tensor = torch.arange(4)
    flight = CopyOut(CPU).start({"x": tensor})
    assert flight.done()
    found = flight.wait()["x"]
    tensor.zero_()
    assert found.tolist() == [0, 1, 2, 3]
