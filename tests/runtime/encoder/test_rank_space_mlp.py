"""The MLP in rank space for Hopper GPUs: it compiles, and agrees with torch."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from tests.runtime.device import DEVICE, random
from tests.runtime.megakernel.test_compiles import SHARED

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from runtime.encoder.kernels.rank_space_mlp import rank_space_mlp_kernel
from runtime.encoder.rank_space_mlp import slots

up, down = map(int, sys.argv[1:])
constants = dict(UP=up, DOWN=down, PANELS=max(up, down), SLOTS=slots(up, down), num_warps=4)
layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
panels = f"tensordesc<bf16[64, 64],{layout!r}>"
types = dict(x=panels, up=panels, down=panels, biases="*bf16", y="*bf16")
types |= dict.fromkeys(constants, "constexpr")
signature = {p.name: types.get(p.name, "i32") for p in rank_space_mlp_kernel.params}
aligned = {
    (n,): [["tt.divisibility", 16]]
    for n, kind in enumerate(signature.values())
    if kind.startswith("*")
}
source = GluonASTSource(rank_space_mlp_kernel, signature, constants, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print(made.metadata.shared)
"""
ON_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.long
@pytest.mark.parametrize("panels", [(5, 5), (1, 3), (4, 1)], ids=str)
def test_kernel_compiles_and_fits_shared_memory(panels: tuple[int, int]) -> None:
    """``panels``: of the ranks of ``up`` and ``down``."""
    command = [sys.executable, "-c", _SCRIPT, *map(str, panels)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) <= SHARED


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("up", "down", "inner"), [(304, 304, 3072), (320, 64, 1536), (8, 200, 72), (72, 8, 64)]
)
@pytest.mark.parametrize("tokens", [1, 63, 128, 1000, 20_000])
def test_outputs_agree_with_torch(tokens: int, up: int, down: int, inner: int) -> None:
    """``up``, ``down``: ranks. Results do not depend on the other tokens."""
    from runtime.encoder.rank_space_mlp import RankSpaceMlp

    u, bias = random(inner, up, seed=1) * up**-0.5, random(inner, seed=2)
    v, x = random(down, inner, seed=3) * inner**-0.5, random(tokens, up, seed=4)
    u, bias, v, x = (each.bfloat16() for each in (u, bias, v, x))
    assert RankSpaceMlp.supports(u, v)
    compute = RankSpaceMlp(u, bias, v)
    found = compute(x)
    activated = functional.gelu(functional.linear(x.float(), u.float(), bias.float()))
    expected = functional.linear(activated, v.float())
    # Each inner activation is rounded to bf16, and the error of their sum is about as large.
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(compute(x[-1:].clone()), found[-1:])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_gelu_in_the_kernel_is_accurate() -> None:
    """The first rank holds values from -12 to 12, which U copies to the first inner activation."""
    from runtime.encoder.rank_space_mlp import RankSpaceMlp

    x = torch.zeros(4096, 64, device=DEVICE, dtype=torch.bfloat16)
    x[:, 0] = torch.linspace(-12, 12, 4096)
    u, v = torch.zeros(64, 64, device=DEVICE), torch.zeros(64, 64, device=DEVICE)
    u[0, 0] = v[0, 0] = 1.0
    found = RankSpaceMlp(u.bfloat16(), None, v.bfloat16())(x)[:, 0].float()
    expected = functional.gelu(x[:, 0].double()).float()
    error = (found - expected).abs()
    assert bool((error <= expected.abs() * 2**-8 + 6.3e-5).all()), error.max()
