"""Triton's interpreter on a machine without a GPU, with three of its faults mended."""

import os
import sys
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def enable() -> None:
    """Without a GPU: interpret kernels. With one: do nothing, the same tests then run the compiled kernels on it."""
    if DEVICE.type == "cuda":
        return
    asked = os.environ.get("TRITON_INTERPRET") == "1"  # tests/conftest.py does, early
    assert asked or "triton" not in sys.modules, "triton was imported before its interpreter was asked for"
    os.environ["TRITON_INTERPRET"] = "1"
    _mend()


def _mend() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)  # its __index__ calls int() on a one-element array, which NumPy 2.4 refuses
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot_in_float32(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, _widen(a), _widen(b), *rest)

    def _widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype("uint32") << 16  # it keeps bfloat16 as integers and would multiply those
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    convert_float = interpreter._convert_float

    def convert_float_or_e4m3(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.float8e4nv:
            return convert_float(data, source, target, rounding)
        codes = torch.from_numpy(data.astype("float32")).to(torch.float8_e4m3fn)  # it loses carries and small values
        return codes.view(torch.uint8).numpy()

    interpreter._convert_float = convert_float_or_e4m3
    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_dot_in_float32
