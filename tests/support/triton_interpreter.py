"""Triton's interpreter on a machine without a GPU, with two of its faults mended."""

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

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_dot_in_float32
