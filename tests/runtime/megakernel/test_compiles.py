"""The decode step's kernel compiles for a Hopper GPU, which needs none."""

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from runtime.megakernel.kernels.step import step_kernel

heads, kv_heads, dim, batch, splits = map(int, sys.argv[1:])
constants = dict(
    B=batch, BL=triton.next_power_of_2(batch), HIDDEN=4096, GATED=11008, VOCAB=32000,
    HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=16, SPLITS=splits, SLOTS=5, AHEAD=1, TALL_AHEAD=2,
)
pointers = {
    "i32": "table flags lengths page_table words", "bf16": "weights embedding pages",
    "i64": "tokens positions parts squares", "fp32": "vectors cos sin hidden gates logits",
}
types = {name: "*" + kind for kind, names in pointers.items() for name in names.split()}
types |= {"eps": "fp32", "scale": "fp32"} | dict.fromkeys(constants, "constexpr")
signature = {p.name: types.get(p.name, "i32") for p in step_kernel.params}
aligned = {
    (n,): [["tt.divisibility", 16]]
    for n, (name, kind) in enumerate(signature.items())
    if kind.startswith("*") or name in ("word_stride", "query_at", "attended_at")
}
source = GluonASTSource(step_kernel, signature, constants, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
print(made.metadata.shared)
"""
SHARED = 227 * 1024
"""Bytes that a program has on an H100 or H200."""


@pytest.mark.parametrize(
    "shape",
    [(32, 32, 128, 1, 4), (32, 8, 128, 1, 16), (32, 8, 128, 8, 2), (9, 3, 64, 2, 22),
     (40, 4, 96, 1, 32), (32, 32, 128, 8, 1)],
    ids=str,
)  # fmt: skip
def test_it_compiles_and_fits(shape: tuple[int, ...]) -> None:
    command = [sys.executable, "-c", _SCRIPT, *map(str, shape)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) <= SHARED
