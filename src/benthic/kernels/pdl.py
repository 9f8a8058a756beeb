"""Programmatic dependent launch: a kernel may be brought up while the one before it still runs.

`launch_dependents` at its top lets the next kernel's programs take their places as soon as all of this one's have
theirs; `wait_for_previous` then holds a program until the kernel before it has ended and its writes are visible. Both
do nothing for a kernel launched otherwise. Two rules keep this right:

- every program waits, those that have nothing to do too: else the kernel may end before its predecessor, and whoever
  waits for it sees the predecessor's results missing;
- before the wait a program reads weights only, and writes nothing.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX `griddepcontrol`.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def pdl(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch whose kernel has a constexpr parameter PDL; on from compute capability 9.0 on."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel's programs come; once a program, at its top."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until the kernel before has ended."""
    if PDL:
        gdc_wait()
