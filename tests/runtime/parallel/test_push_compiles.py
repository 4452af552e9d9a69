"""Compile the collectives for a Hopper GPU, on a host without one."""

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime.parallel import push

name, ranks, block, threads, norms = sys.argv[1], *map(int, sys.argv[2:])
kernel = getattr(push, name)
constants = dict(RANKS=ranks, HALF=1 << 20, BLOCK=block, COUNT=block // threads)
if "sum" in name:
    constants |= dict(ADDS=not norms, NORMS=bool(norms))
types = {"part": "*i32", "addend": "*i32", "out": "*i32", "addresses": "*i64", "state": "*i32"}
types |= {"x": "*bf16", "eps": "fp32"}
types |= dict.fromkeys(constants, "constexpr")
signature = {p.name: types.get(p.name, "i32") for p in kernel.params}
source = ASTSource(kernel, signature, constants)
made = triton.compile(
    source, target=GPUTarget("cuda", 90, 32), options={"num_warps": threads // 32}
)
ptx = made.asm["ptx"]
assert ptx.count("ld.relaxed.sys") >= ranks * block // threads
assert "bar.sync" in ptx[ptx.rindex("ld.relaxed.sys"):ptx.index("atom.")]
"""


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("gather_kernel", 0),
        ("sum_kernel", 0),
        ("sum_kernel", 1),
        ("two_step_sum_kernel", 0),
        ("two_step_sum_kernel", 1),
    ],
)
@pytest.mark.parametrize(("ranks", "block", "threads"), [(2, 256, 256), (4, 4096, 512)])
def test_collective_compiles(name: str, norms: int, ranks: int, block: int, threads: int) -> None:
    numbers = map(str, (ranks, block, threads, norms))
    command = [sys.executable, "-c", _SCRIPT, name, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
