"""Kernels run in Triton's interpreter here, or compiled where there is a GPU."""

from tests.support import triton_interpreter

triton_interpreter.enable()
