"""Compile the megakernel for a Hopper GPU, on a host without one."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from runtime.megakernel.kernels import arguments
from runtime.megakernel.kernels.step import step_kernel

heads, kv_heads, dim, batch, splits, ranks, height = map(int, sys.argv[1:])
constants = {
    "SHAPE": arguments.Shape.of(
        B=batch, BL=triton.next_power_of_2(batch), HIDDEN=4096, GATED=11008, VOCAB=32000,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=16, SPLITS=splits,
        RANKS=ranks, SUMS=4096, HEIGHT=height,
    ),
    "RING": arguments.Ring.of(SLOTS=5, AHEAD=1, TALL_AHEAD=2),
}
signature = {
    "schedule": arguments.Schedule("*i64", "i32", "*i32"),
    "weights": arguments.Weights("*bf16", "*fp32", "*bf16", "fp32"),
    "batch": arguments.Batch("*i64", "*i64", "*i32", "*i32", "i32"),
    "pages": arguments.Pages("*bf16", "i32", "i32"),
    "rope": arguments.Rope("*fp32", "*fp32"),
    "messages": arguments.Messages("*i32", "i32", "*i64", "*i64"),
    "buffers": arguments.Buffers("*fp32", "*fp32", "*fp32"),
    "attention": arguments.Attention("fp32", "i32", "i32"),
    "ranks": arguments.Ranks("i32", "i32", "*i64", "*i64", "*i64", "*i64"),
    **dict.fromkeys(constants, "constexpr"),
}
multiples = {("messages", "stride"), ("attention", "query_offset"), ("attention", "output_offset")}
aligned = {
    (i, j): [["tt.divisibility", 16]]
    for i, (name, group) in enumerate(signature.items()) if name not in constants
    for j, (field, kind) in enumerate(zip(group._fields, group))
    if kind.startswith("*") or (name, field) in multiples
}
source = GluonASTSource(step_kernel, signature, constants, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
print(made.metadata.shared)
"""
SHARED = 227 * 1024
"""Maximum bytes of shared memory per program on an H100 or H200."""


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [(32, 32, 128, 1, 4, 1, 0), (32, 8, 128, 1, 16, 1, 0), (32, 8, 128, 8, 2, 1, 0),
     (9, 3, 64, 2, 22, 1, 0), (40, 4, 96, 1, 32, 1, 0), (32, 32, 128, 8, 1, 1, 0),
     (16, 2, 128, 1, 32, 4, 0), (5, 2, 64, 8, 8, 2, 0), (16, 2, 128, 1, 32, 4, 1024),
     (5, 2, 64, 8, 8, 3, 1368)],
    ids=str,
)  # fmt: skip
def test_step_kernel_compiles_and_fits_shared_memory(shape: tuple[int, ...]) -> None:
    """``shape``: query heads, KV heads, head dimension, number of sequences, maximum splits, ranks,
    `arguments.Shape.HEIGHT`."""
    command = [sys.executable, "-c", _SCRIPT, *map(str, shape)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) <= SHARED
