"""Compile the kernels of format `lowrank` for a Hopper GPU, on a host without one."""

import subprocess
import sys

import pytest

from tests.runtime.megakernel.test_compiles import SHARED

pytestmark = [pytest.mark.slow, pytest.mark.long]

_SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime.attention.splits import MIN_TILES, merge_sizes
from runtime.kv.lowrank import gpu
from runtime.kv.lowrank.decode_kernel import latent_decode_kernel
from runtime.kv.lowrank.kernels import append_latents_kernel, rebuild_kernel

dim, rank, biased, dtype = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True", sys.argv[4]
width = (rank + 7) // 8 * 8
names = ("k_latents", "v_latents", "k_pages", "v_pages")
types = dict.fromkeys(names, "*bf16")
types |= dict.fromkeys(("q", "qkv", "u_k", "u_v", "k_bias", "v_bias", "out"), dtype)
types |= dict.fromkeys(("page_table", "lengths", "counters", "starts", "sequences_"), "*i32")
types |= dict.fromkeys(("cos", "sin", "split_acc", "split_m", "split_l"), "*fp32")
types |= {"positions": "*i64", "scale": "fp32"}
common = dict(
    KV_HEADS=8, GROUP=4, HEADS=32, DIM=dim, HALF=max(16, triton.next_power_of_2(dim // 2)),
    DIMS=triton.next_power_of_2(dim), PAGE=16, CHUNK=gpu._CHUNK, CHUNKS=-(-width // gpu._CHUNK),
    SEQUENCES=16, MIN_TILES=MIN_TILES, **merge_sizes(4), BY_HALVES=True, ROWS=16,
    COLUMNS=gpu._COLUMNS,
) | ({} if biased else {"k_bias": None, "v_bias": None})
for kernel, tile, warps, stages in (
    (latent_decode_kernel, gpu._DECODE_TILE, gpu._WARPS, gpu._STAGES),
    (rebuild_kernel, gpu._REBUILD_TILE, gpu._WARPS, gpu._STAGES),
    (append_latents_kernel, 0, 2, 1),
):
    constants = common | {"BLOCK": tile}
    own = types | ({"sequences": "*i32"} if kernel is append_latents_kernel else {})
    parameters = [parameter.name for parameter in kernel.params]
    signature = {n: "constexpr" if n in constants else own.get(n, "i32") for n in parameters}
    given = {(parameters.index(n),): v for n, v in constants.items() if n in parameters}
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(parameters)
        if str(signature[name]).startswith("*") or name in ("k_stride", "v_stride", "page_stride")
    }
    compiled = ASTSource(kernel, signature, given, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(compiled, target=GPUTarget("cuda", 90, 32), options=options)
    print(made.metadata.shared, made.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.parametrize(
    ("dim", "rank", "biased", "dtype"),
    [
        (128, 491, False, "*bf16"),  # Llama-3-8B at keep 0.6
        (128, 614, True, "*bf16"),  # rank fraction 0.6
        (96, 1029, False, "*bf16"),  # Phi-3-mini at keep 0.67
        (64, 40, True, "*fp32"),
    ],
)
def test_kernels_compile_fit_shared_memory_and_use_tensor_cores(
    dim: int, rank: int, biased: bool, dtype: str
) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(dim), str(rank), str(biased), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    decode, rebuild, append = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert max(shared for shared, _ in (decode, rebuild, append)) <= SHARED
    assert decode[1] > 0
    assert rebuild[1] > 0
    assert append[1] == 0
