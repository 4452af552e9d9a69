"""Attention with operands in registers: it compiles for Hopper GPUs.

Its results are compared with the reference by the GPU tests in `test_kernels`.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from runtime.config import ModelConfig
from runtime.kv import kernel_source
from runtime.kv.gpu import page_strides
from runtime.kv.kernel_source import FragmentSource, KernelSource
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.registry import COMPRESSED
from runtime.kv.shard import ShardFormat
from runtime.offline.bench.kv_formats import random_shard, shard_artifact
from tests.runtime.kv.compressed_data import LLAMA_3_8B, compressed_planes

_SCRIPT = """
import importlib, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from runtime.kv.kernels.windowed_fragments import windowed_fragments_kernel as kernel

name, planes = sys.argv[1], tuple(sys.argv[2].split(","))
kv_heads, group, dim, tile, warps, registers, sequences, *strides = map(int, sys.argv[3:])
fragments = importlib.import_module(f"runtime.kv.{name}.fragments")
strides = tuple(strides)
constants = dict(
    ATTEND=fragments.attend, PARTS=fragments.PARTS, KV_HEADS=kv_heads, GROUP=group, DIM=dim,
    WIDTH=dim, PAGE=16, WINDOW=64, SINK_PAGES=1, BLOCK=tile, SEQUENCES=sequences, MIN_TILES=2,
    PROGRAMS=1456, STRIDES=strides, WARPS=warps,
)
types = dict(planes=planes, scale="fp32", **dict.fromkeys(("q", "k_pages", "v_pages"), "*bf16"))
types |= dict.fromkeys(("page_table", "stored_table", "lengths"), "*i32")
types |= dict.fromkeys(("split_acc", "split_m", "split_l"), "*fp32")
types |= dict.fromkeys(constants, "constexpr")
signature = {p.name: types.get(p.name, "i32") for p in kernel.params}
source = GluonASTSource(kernel, signature, constants, {})
options = {"num_warps": warps, "maxnreg": registers}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print("wgmma" in made.asm["ptx"])
"""


SHARD_PLANES = (
    "*u8,*u8,*bf16,*fp8e4nv,*fp32,*fp32,*bf16,*fp32,*fp32,*fp32,*fp32,*fp8e4nv,*fp16,*fp16"
)


def _format(name: str, config: ModelConfig) -> QuantizedFormat | ShardFormat:
    if name == "shard":
        return random_shard(replace(config, num_layers=1, context_length=1024))
    kv_format = COMPRESSED[name](config)
    assert isinstance(kv_format, QuantizedFormat)
    return kv_format


def _fragments(name: str, config: ModelConfig) -> FragmentSource:
    source: KernelSource = _format(name, config).kernel_source()
    assert source.fragments is not None
    return source.fragments


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "planes", "shape", "sequences"),
    [
        ("fp8", "*fp8e4nv,*fp8e4nv,*u8,*u8", (8, 4, 128), 16),
        ("fp8-e5m2", "*fp8e5,*fp8e5,*u8,*u8", (3, 3, 64), 16),
        ("int4", "*u8,*u8,*bf16,*bf16", (3, 3, 64), 1024),
        ("k4v2", "*u8,*u8,*bf16,*bf16", (8, 4, 128), 16),
        ("shard", SHARD_PLANES, (8, 4, 128), 16),
        ("shard", SHARD_PLANES, (8, 4, 128), 1024),
    ],
)
def test_kernel_compiles(
    name: str, planes: str, shape: tuple[int, int, int], sequences: int
) -> None:
    """``shape``: KV heads, query heads of each, head dimension."""
    kv_heads, _, dim = shape
    config = replace(LLAMA_3_8B, num_kv_heads=kv_heads, head_dim=dim)
    fragments = _fragments(name, config)
    assert dim in fragments.dims
    module = name.partition("-")[0]
    strides = page_strides(compressed_planes(_format(name, config), 2))
    sizes = fragments.tile, fragments.warps, fragments.registers, sequences
    numbers = (*shape, *sizes, *strides)
    command = [sys.executable, "-c", _SCRIPT, module, planes, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{name == 'shard'}\n"


@pytest.mark.parametrize(("full_precision", "programs"), [(8, 1576), (128, 1456), (4096, 792)])
def test_programs_of_compressed_tiles_leave_room_for_those_of_full_precision_tokens(
    full_precision: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,584 programs run at once. At least half of them are for compressed tiles."""
    monkeypatch.setattr(kernel_source, "decode_programs", lambda device, each: 132 * each)
    fragments = _fragments("int4", LLAMA_3_8B)
    assert fragments.compressed_programs(torch.device("cuda"), full_precision) == programs


def test_ranks_of_shard_that_the_kernel_does_not_support() -> None:
    """If a layer has another rank, the Triton kernel attends in all layers."""
    config = replace(LLAMA_3_8B, num_layers=2, context_length=1024)
    assert random_shard(config, (192,)).kernel_source().fragments is not None
    assert random_shard(config, (160,)).kernel_source().fragments is None
    usual, smaller = (shard_artifact(config, (rank,)) for rank in (192, 64))
    of_layer = {name: x for name, x in smaller.tensors.items() if name.endswith(".1")}
    mixed = ShardFormat(config, replace(usual, tensors={**usual.tensors, **of_layer}))
    assert mixed.kernel_source().fragments is None
