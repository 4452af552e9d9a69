"""The kernel of products with many tokens compiles for a Hopper GPU, which needs none."""

import subprocess
import sys

import pytest

from runtime.gemm.epilogues import Kind
from tests.runtime.megakernel.test_compiles import SHARED

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from runtime.gemm.kernels.large_m import GATED, large_linear_kernel
from runtime.gemm.large_m import stages

groups, rows, kind, bias, splits = map(int, sys.argv[1:])
constants = dict(
    GROUPS=groups, BN=rows, KIND=kind, BIAS=bool(bias), SPLITS=splits,
    STAGES=stages(64 * groups + rows),
)
layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
weights = rows // 2 if kind == GATED.value else rows
types = dict.fromkeys(("x", "residual"), f"tensordesc<bf16[{64 * groups}, 64],{layout!r}>")
types |= {f"weights{n}": f"tensordesc<bf16[{weights}, 64],{layout!r}>" for n in range(3)}
types |= {"y": "*bf16", "biases": "*fp32", "sums": "*fp32", "arrived": "*i32"}
types |= dict.fromkeys(constants, "constexpr")
signature = {p.name: types.get(p.name, "i32") for p in large_linear_kernel.params}
aligned = {
    (n,): [["tt.divisibility", 16]]
    for n, kind in enumerate(signature.values())
    if kind.startswith("*")
}
source = GluonASTSource(large_linear_kernel, signature, constants, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print(made.metadata.shared)
"""


@pytest.mark.parametrize(
    ("groups", "rows", "kind", "bias", "splits"),
    [
        (2, 256, Kind.PLAIN, False, 1),
        (2, 256, Kind.RESIDUAL, False, 1),
        (2, 256, Kind.GATED, True, 1),
        (1, 128, Kind.PLAIN, True, 4),
        (2, 64, Kind.PLAIN, False, 1),
    ],
)
def test_it_compiles_and_fits(groups: int, rows: int, kind: Kind, bias: bool, splits: int) -> None:
    numbers = map(str, (groups, rows, int(kind), int(bias), splits))
    command = [sys.executable, "-c", _SCRIPT, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) <= SHARED
