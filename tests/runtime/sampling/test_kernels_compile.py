"""Compile the kernels of sampling for a Hopper GPU, on a host without one."""

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime.sampling import kernels

kernel = getattr(kernels, sys.argv[1])
doubles = dict.fromkeys(("temperature", "partials", "log_sums", "reals"), "*fp64")
singles = dict.fromkeys(("logits", "largest", "values", "masked"), "*fp32")
words = dict.fromkeys(("tokens", "best", "words", "sampled"), "*i64")
constants = {"SPLITS": 32, "BLOCK": 1024, "WIDTH": 1024}
constants = {name: constants[name] for name in kernel.arg_names if name in constants}
integers = dict.fromkeys(("masks", "index"), "*i32")
types = integers | doubles | singles | words | dict.fromkeys(constants, "constexpr")
signature = {name: types.get(name, "i32") for name in kernel.arg_names}
source = ASTSource(kernel, signature, constants)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
assert "ex2.approx" not in made.asm["ptx"], "probabilities are fp64"
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mask_kernel", "partial_sums_kernel", "draw_kernel"])
def test_kernel_compiles(name: str) -> None:
    command = [sys.executable, "-c", _SCRIPT, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
