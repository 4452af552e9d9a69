"""Compile the kernels of formats with compressed pages for a Hopper GPU, on a host without one."""

import subprocess
import sys

import pytest

from tests.runtime.megakernel.test_compiles import SHARED

pytestmark = pytest.mark.slow

_SCRIPT = """
import sys
from dataclasses import replace
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime.offline.bench.shapes import SHAPES
from runtime.kv.gpu import page_strides
from runtime.kv.kernels.encode import encode_kernel, encode_leaving_kernel
from runtime.kv.kernels.windowed import merge_windowed_kernel, windowed_decode_kernel
from runtime.offline.bench.kv_formats import RANDOM, RANKS
from runtime.kv.registry import COMPRESSED
from runtime.kv.windowed import compressed_cache

config = replace(SHAPES["llama-3-8b"], num_layers=1)
name, _, rank = sys.argv[1].partition(":")
if name in RANDOM:
    kv_format = RANDOM[name](config, (int(rank),) if rank else RANKS[name])
    made = kv_format.layer(0).kernel_inputs()
    inputs, costs = made.planes, bool(made.costs)
else:
    kv_format = COMPRESSED[name](config)
    inputs, costs = kv_format.kernel_inputs(torch.device("cpu")).planes, False
source = kv_format.kernel_source()
dtypes = {
    torch.uint8: "*u8", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5", torch.int32: "*i32",
    torch.float32: "*fp32",
}
stored = kv_format.planes(0, 16)
strides = page_strides(compressed_cache(stored, 2).layer(0))
inputs = (*stored, *inputs)
planes = tuple("i32" if isinstance(x, int) else dtypes[x.dtype] for x in inputs)
types = dict.fromkeys(("q", "k_pages", "v_pages", "keys", "values", "out"), "*bf16")
types |= dict.fromkeys(("sources", "targets", "positions", "offsets"), "*i64")
types |= dict.fromkeys(("k_strides", "v_strides"), ("i32",) * 3)
types |= dict.fromkeys(("page_table", "stored_table", "lengths", "counters"), "*i32")
types |= dict.fromkeys(("split_acc", "split_m", "split_l"), "*fp32") | {"scale": "fp32"}
types |= {"planes": planes} | ({"costs": "*i32"} if costs else {})
constants = dict(
    ATTEND=source.attend, FINISH=source.finish, ENCODE=source.encode.encode,
    PAGES=max(1, source.encode.tokens // 16), KV_HEADS=8, PROGRAMS=528,
    SUMS=64 if source.latents else 128, GROUP=4, ROWS=16, STORED_ROWS=source.rows, DIM=128,
    WIDTH=128,
    K_WIDTH=stored[0].shape[2], V_WIDTH=stored[1].shape[2], STRIDES=strides,
    PAGE=16, WINDOW=64, SINK_PAGES=1, BLOCK=source.tile, EXACT_BLOCK=source.full_precision_tile,
    SEQUENCES=16, MIN_TILES=2, MERGED=16, MIN_COST=16, SPLITS=0,
) | ({} if costs else {"costs": None})
encode = source.encode
alone = max(1, encode.warps // encode.heads)  # warps of a program of one KV head
for kernel, programs, heads, warps, stages in (
    (windowed_decode_kernel, source.programs, 1, source.warps, source.stages),
    (merge_windowed_kernel, 1, 1, 2, source.stages),
    (encode_kernel, 1, encode.heads, encode.warps, encode.stages),
    (encode_leaving_kernel, 1, 1, alone, encode.stages),
):
    constants["HEADS"] = heads
    names = [parameter.name for parameter in kernel.params]
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    given = {(names.index(n),): value for n, value in constants.items() if n in names}
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(names)
        if str(signature[name]).startswith("*") or name.endswith("_stride")
    }
    at = names.index("planes")
    aligned |= {
        (at, n): [["tt.divisibility", 16]] for n, kind in enumerate(planes) if kind != "i32"
    }
    options = {"num_warps": warps, "num_stages": stages}
    compiled = ASTSource(kernel, signature, given, aligned)
    made = triton.compile(compiled, target=GPUTarget("cuda", 90, 32), options=options)
    print(made.metadata.shared, programs)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *("fp8", "fp8-e5m2", "int4", "k4v2", "stream8", "stream4", "fdc", "palu", "shard"),
        "shard:1024",
    ],
)
def test_kernels_compile_and_programs_fit_shared_memory(name: str) -> None:
    """All programs of attention on a multiprocessor run at the same time, at common ranks."""
    command = [sys.executable, "-c", _SCRIPT, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rows) == 4
    assert max(shared for shared, _ in rows) <= SHARED
    if name != "shard:1024":  # full rank, which is larger than usual
        (attention, programs), *_ = rows
        assert 0 < attention * programs <= SHARED
