"""Compile the few-token GEMM kernel for a Hopper GPU, on a host without one."""

import subprocess
import sys

import pytest

from runtime.gemm.epilogues import Epilogue

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime.gemm.kernels.small_m import small_gemm_kernel

epilogue, *offsets = sys.argv[1:]
constants = dict(EPILOGUE=int(epilogue), BIAS=False, BM=16, BN=64, BK=64, SPLITS=1, BAND=8)
types = dict.fromkeys(("x", "weights", "residual", "y"), "*bf16")
types |= {"biases": "*fp32", "partials": "*fp32", "counters": "*i32"}
types |= dict.fromkeys(constants, "constexpr")
types |= {f"offset{n}": kind for n, kind in enumerate(offsets)}
signature = {p.name: types.get(p.name, "i32") for p in small_gemm_kernel.params}
source = ASTSource(small_gemm_kernel, signature, constants)
triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("epilogue", [Epilogue.PLAIN, Epilogue.GATED])
@pytest.mark.parametrize(
    "offsets", [("i32", "i64", "i32"), ("i64", "i32", "i32"), ("i64", "i64", "i64")]
)
def test_weights_may_be_far_apart(epilogue: Epilogue, offsets: tuple[str, ...]) -> None:
    """An allocator may place weights at addresses whose distance exceeds 32 bits of lines."""
    command = [sys.executable, "-c", _SCRIPT, str(int(epilogue)), *offsets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
