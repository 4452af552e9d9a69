"""Compile the many-token GEMM kernel for a Hopper GPU, on a host without one."""

import subprocess
import sys

import pytest

from runtime.gemm.epilogues import Epilogue
from tests.runtime.megakernel.test_compiles import SHARED

pytestmark = pytest.mark.slow

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from runtime.gemm.kernels.large_m import GATED, large_gemm_kernel
from runtime.gemm.large_m import _REGISTERS, stages

groups, rows, epilogue, apart, bias, splits = map(int, sys.argv[1:])
constants = dict(
    GROUPS=groups, BN=rows, EPILOGUE=epilogue, APART=bool(apart), BIAS=bool(bias), SPLITS=splits,
    STAGES=stages(groups, rows, bool(apart)),
)
layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
weights = rows // 2 if epilogue == GATED.value else rows
types = dict.fromkeys(("x", "residual"), f"tensordesc<bf16[{64 * groups}, 64],{layout!r}>")
types |= {f"weights{n}": f"tensordesc<bf16[{weights}, 64],{layout!r}>" for n in range(3)}
types |= {"y": "*bf16", "biases": "*fp32", "partials": "*fp32", "counters": "*i32"}
types |= dict.fromkeys(constants, "constexpr")
signature = {p.name: types.get(p.name, "i32") for p in large_gemm_kernel.params}
aligned = {
    (n,): [["tt.divisibility", 16]]
    for n, kind in enumerate(signature.values())
    if kind.startswith("*")
}
source = GluonASTSource(large_gemm_kernel, signature, constants, aligned)
options = {"num_warps": 4, "maxnreg": _REGISTERS[groups]}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
assert "griddepcontrol.wait" in made.asm["ptx"]
print(made.metadata.shared)
"""


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("groups", "rows", "epilogue", "apart", "bias", "splits"),
    [
        (2, 256, Epilogue.PLAIN, False, False, 1),
        (2, 256, Epilogue.RESIDUAL, False, False, 1),
        (2, 256, Epilogue.GATED, False, True, 1),
        (1, 128, Epilogue.PLAIN, False, True, 4),
        (2, 64, Epilogue.PLAIN, False, False, 1),
        (1, 64, Epilogue.RESIDUAL, False, False, 1),
        (1, 32, Epilogue.PLAIN, False, False, 3),
        (1, 128, Epilogue.GATED, False, False, 1),
        (1, 128, Epilogue.GATED, True, True, 1),
        (1, 64, Epilogue.GATED, True, False, 1),
    ],
)
def test_large_gemm_kernel_compiles_and_fits_shared_memory(
    groups: int, rows: int, epilogue: Epilogue, apart: bool, bias: bool, splits: int
) -> None:
    numbers = map(str, (groups, rows, int(epilogue), int(apart), int(bias), splits))
    command = [sys.executable, "-c", _SCRIPT, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    # With one group, two programs fit on a multiprocessor.
    assert int(done.stdout.split()[0]) <= SHARED // (2 if groups == 1 else 1)
