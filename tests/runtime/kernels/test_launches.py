"""Kernels that are found by skipping launches are those that the launches then need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

class Driver:  # a GPU that can be compiled for, but not launched on
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Driver())

from runtime.kernels.compile_pool import CompilePool
from runtime.kernels.launches import launches_skipped
from runtime.layers.gpu import TritonRmsNorm, triton_silu_mul
from ordered_kernels import first, second

def launch():
    for width in (64, 128, 64, 100):
        norm = TritonRmsNorm(torch.ones(width), 1e-5)
        y = norm(torch.ones(3, width, dtype=torch.bfloat16))
        triton_silu_mul(y)
    first[(1,)](y)
    second[(1,)](y)

found = []
with launches_skipped(found.append):
    launch()
    launch()
with CompilePool(2) as pool:
    for source in reversed(found):
        pool.submit(source)
    status = pool.wait()
assert not status.errors, status.errors

compiled, hits = [], []
def listener(*, src, metadata, metadata_group, times, cache_hit):
    compiled.append(src.name)
    hits.append(cache_hit)
triton.knobs.compilation.listener = listener
triton.compiler.CompiledKernel.launch_metadata = lambda *_: None
triton.compiler.CompiledKernel._init_handles = lambda self: None
triton.compiler.CompiledKernel.run = property(lambda self: lambda *_: None)
launch()
assert all(hits), list(zip(compiled, hits))
print(status.submitted, len(hits))
"""

_KERNELS = """
import triton
import triton.language as tl

THREE = tl.constexpr(3)

@triton.jit
def shared(x):
    return x + THREE

@triton.jit
def first(x):
    tl.store(x, shared(tl.load(x)))

@triton.jit
def second(x):
    tl.store(x, shared(tl.load(x)) + 1)
"""
"""The cache key of ``second`` depends on whether ``shared`` was used before, by ``first``. The
pool compiles ``second`` first."""


def test_launches_find_their_kernels_in_the_cache(tmp_path: Path) -> None:
    """Widths of 64 and 128 select different constants; 100 is no multiple of 16."""
    (tmp_path / "ordered_kernels.py").write_text(_KERNELS)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    cache = str(tmp_path / "cache")
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": paths}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    submitted, launched = map(int, done.stdout.split())
    assert submitted == launched >= 6
