"""Ragged attention for Hopper GPUs: it compiles, and agrees with the reference."""

import subprocess
import sys

import pytest
import torch

from runtime.encoder.attention import ReferenceAttention
from runtime.encoder.batch import EncoderInput, RaggedBatch
from tests.runtime.device import DEVICE, random
from tests.runtime.megakernel.test_compiles import SHARED

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from runtime.encoder.hopper_attention import TILES
from runtime.encoder.kernels.attention_hopper import ragged_attention_kernel

tile = TILES[int(sys.argv[1])]
constants = dict(KEYS=tile.keys, SLOTS=tile.slots, REGISTERS=tile.registers, num_warps=4)
layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
tiles = f"tensordesc<bf16[{tile.keys}, 64],{layout!r}>"
types = dict(q=f"tensordesc<bf16[64, 64],{layout!r}>", k=tiles, v=tiles, starts="*i32")
types |= dict(q_bias="*bf16", v_bias="*bf16", out="*bf16", scale="fp32")
types |= dict.fromkeys(constants, "constexpr")
signature = {p.name: types.get(p.name, "i32") for p in ragged_attention_kernel.params}
aligned = {
    (n,): [["tt.divisibility", 16]]
    for n, kind in enumerate(signature.values())
    if kind.startswith("*")
}
source = GluonASTSource(ragged_attention_kernel, signature, constants, aligned)
options = {"num_warps": 4, "maxnreg": tile.launched}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(made.metadata.shared)
"""
ON_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.long
@pytest.mark.parametrize("tile", range(3))
def test_kernel_compiles_and_fits_shared_memory(tile: int) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) <= SHARED


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tile", range(3))
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("lengths", [(1, 63, 64, 65, 127, 128, 129, 5), (512,) * 40, (3000,), ()])
def test_outputs_agree_with_the_reference(
    tile: int, biases: bool, lengths: tuple[int, ...]
) -> None:
    """Queries are overwritten, and are in parts of the batch."""
    from runtime.encoder.hopper_attention import TILES, HopperRaggedAttention
    from runtime.offline.bench.encoder import SHAPES

    config = SHAPES["bert-base"]
    batch = RaggedBatch.of([EncoderInput((1,) * length) for length in lengths], DEVICE)
    q, k, v = random(3, sum(lengths), config.hidden_size).bfloat16()
    q_bias, v_bias = random(2, config.hidden_size, seed=5).bfloat16() * biases
    expected = ReferenceAttention(config)(
        q.float() + q_bias.float(), k.float(), v.float() + v_bias.float(), batch
    )
    added = (q_bias, v_bias) if biases else (None, None)
    attention, first = HopperRaggedAttention(config, TILES[tile]), 0
    assert HopperRaggedAttention.supports(config, DEVICE)
    for part in batch.divided(1000) if lengths else []:
        own = slice(first, first + len(part.tokens))
        first = own.stop
        attention.attend(q[own], k[own], v[own], part, q[own], *added)
    torch.testing.assert_close(q.float(), expected, rtol=2e-2, atol=2e-2)
