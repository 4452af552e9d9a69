"""The prefill kernel for Hopper GPUs: it compiles, and gives the same bits as the other kernel."""

import subprocess
import sys

import pytest
import torch

from runtime.attention import hopper
from runtime.attention.gpu import TritonAttention
from tests.runtime.attention.samples import batch_of, random_pages
from tests.runtime.device import DEVICE, random
from tests.runtime.megakernel.test_compiles import SHARED

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from runtime.attention.hopper import _SLOTS
from runtime.attention.kernels.prefill_hopper import prefill_kernel

heads, kv_heads, dim, page = map(int, sys.argv[1:])
constants = dict(HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, SLOTS=_SLOTS, num_warps=4)
layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
pages = f"tensordesc<bf16[{page}, 64],{layout!r}>"
types = dict(q="*bf16", out="*bf16", k_descriptor=pages, v_descriptor=pages, scale="fp32")
types |= dict.fromkeys(("page_table", "starts", "lengths"), "*i32")
types |= dict.fromkeys(constants, "constexpr")
signature = {p.name: types.get(p.name, "i32") for p in prefill_kernel.params}
aligned = {
    (n,): [["tt.divisibility", 16]]
    for n, kind in enumerate(signature.values())
    if kind.startswith("*")
}
source = GluonASTSource(prefill_kernel, signature, constants, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print(made.metadata.shared)
"""
ON_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(32, 8, 128, 16), (9, 3, 64, 8)], ids=str)
def test_kernel_compiles_and_fits_shared_memory(shape: tuple[int, ...]) -> None:
    """``shape``: query heads, KV heads, head dimension, page size."""
    command = [sys.executable, "-c", _SCRIPT, *map(str, shape)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) <= SHARED


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64)], ids=str)
@pytest.mark.parametrize(
    ("lengths", "new"),
    [([1], 1), ([127, 128, 129], 128), ([17, 300, 1], 40), ([2000, 700], 512), ([5000], 1024)],
)
def test_bits_equal_those_of_the_other_kernel(
    shape: tuple[int, int, int], lengths: list[int], new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unused slots of pages contain NaN."""
    heads, kv_heads, dim = shape
    batch = batch_of(lengths, new, DEVICE)
    k, v = random_pages(lengths, kv_heads, dim, DEVICE)
    q = random(len(batch.tokens), heads, dim).bfloat16()
    attention = TritonAttention(heads, kv_heads, dim)
    got, expected = q.new_empty(2, len(q), heads * dim)
    assert hopper.supports(q, k)
    attention._prefill(q, k, v, batch, got)
    monkeypatch.setattr(hopper, "supports", lambda q, k_pages: False)
    attention._prefill(q, k, v, batch, expected)
    assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_bits_do_not_depend_on_chunks() -> None:
    length = 1500
    k, v = random_pages([length], 2, 128, DEVICE)
    q = random(length, 8, 128).bfloat16()
    attention = TritonAttention(8, 2, 128)
    whole = attention.attend(q, k, v, batch_of([length], length, DEVICE))
    for new in (16, 130, 1008):
        last = attention.attend(q[-new:], k, v, batch_of([length], new, DEVICE))
        assert torch.equal(last, whole[-new:]), new
