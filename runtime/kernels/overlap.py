# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Programmatic dependent launch: a kernel starts while the previous one of its stream still runs.

On GPUs of compute capability 9.0 and later, launch a kernel with ``**overlapped(device)``. Its
programs then start when all programs of the previous kernel have called `after_previous` or
`start_next`, or have ended, and when there is room on a multiprocessor. Each program must call
`after_previous` or `wait_for_previous` before it writes anything, and before it reads what an
earlier kernel may have written. Weights may be read before that call if, since they were written, a
kernel was launched without the option. Steps always launch some, such as that of the embedding.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from runtime.kernels.arith import INTERPRETED

_CAPABILITY = (9, 0)


@cache
def overlapped(device: torch.device) -> dict[str, bool]:
    """Return the launch option of kernels that call `after_previous` or `wait_for_previous`."""
    supported = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY
    return {"launch_pdl": True} if supported else {}


@triton.jit
def after_previous():
    """Call `start_next` and `wait_for_previous`."""
    start_next()
    wait_for_previous()


@triton.jit
def start_next():
    """Allow the next kernel of the stream to start once all programs of this one have called it."""
    if not INTERPRETED:
        _launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until all earlier kernels of the stream have ended and their results are visible.

    The instruction waits for the previous kernel only, which has waited for those before it.
    """
    if not INTERPRETED:
        _wait()


@tl.core.extern
def _launch_dependents(_semantic: Any = None) -> None:
    if _supported(_semantic):
        tl.extra.cuda.gdc_launch_dependents(_semantic=_semantic)


@tl.core.extern
def _wait(_semantic: Any = None) -> None:
    if _supported(_semantic):
        tl.extra.cuda.gdc_wait(_semantic=_semantic)


def _supported(semantic: Any) -> bool:
    """Return whether the GPU for which a kernel is compiled has these instructions."""
    major, minor = _CAPABILITY
    return int(semantic.builder.options.arch.removeprefix("sm")) >= 10 * major + minor
