"""Compile kernels that start before the previous one has ended, on a host without a GPU."""

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import triton
from importlib import import_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, name, constants, types = sys.argv[1], sys.argv[2], *map(eval, sys.argv[3:])
kernel = getattr(import_module(module), name)
signature = {
    p.name: "constexpr" if p.name in constants else types.get(p.name, "*bf16")
    for p in kernel.params
}
for capability in (80, 90):
    made = triton.compile(
        ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32)
    )
    ptx = made.asm["ptx"]
    assert ("griddepcontrol" in ptx) == (capability >= 90), capability
before = ptx[:ptx.index("griddepcontrol.wait")]
assert "griddepcontrol.launch_dependents" in before
assert not any(access in before for access in ("ld.global", "st.global", "cp.async", "atom."))
"""


def of_type(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("module", "name", "constants", "types"),
    [
        (
            "runtime.layers.kernels",
            "rms_norm_kernel",
            {"WIDTH": 64},
            of_type("i32", "width") | of_type("fp32", "eps"),
        ),
        ("runtime.layers.kernels", "silu_mul_kernel", {"BLOCK": 64}, of_type("i32", "width")),
        (
            "runtime.attention.kernels.rope_write",
            "rope_write_kernel",
            {"HEADS": 4, "KV_HEADS": 2, "DIM": 32, "PAGE": 16, "ROWS": 8, "HALF": 16}
            | {"BY_HALVES": True, "NORM": False, "EPS": 0.0, "q_norm": None, "k_norm": None},
            of_type("*i64", "positions")
            | of_type("*fp32", "cos sin")
            | of_type("*i32", "sequences starts lengths page_table")
            | of_type("i32", "table_stride page_stride head_stride"),
        ),
        (
            "runtime.attention.kernels.decode",
            "decode_kernel",
            {"KV_HEADS": 2, "GROUP": 2, "ROWS": 16, "DIM": 32, "WIDTH": 32, "PAGE": 16}
            | {"BLOCK": 64, "SEQUENCES": 8, "MIN_TILES": 2, "MERGED": 8, "MERGED_HEADS": 2},
            of_type("*fp32", "split_acc split_m split_l")
            | of_type("*i32", "page_table lengths counters")
            | of_type("i32", "page_stride head_stride table_stride sequences")
            | of_type("fp32", "scale"),
        ),
        (
            "runtime.gemm.kernels.small_m",
            "small_gemm_kernel",
            {"EPILOGUE": 0, "BIAS": False, "BM": 16, "BN": 32, "BK": 64, "SPLITS": 2, "BAND": 8}
            | {"biases": None},
            of_type("*fp32", "partials")
            | of_type("*i32", "counters")
            | of_type("i32", "x_stride y_stride tokens")
            | {
                f"{kind}{n}": "i32"
                for kind in ("offset", "width", "stride", "first", "rows")
                for n in range(3)
            },
        ),
    ],
    ids=lambda each: each if isinstance(each, str) and each.endswith("_kernel") else "",
)
def test_kernel_waits_before_it_accesses_memory(
    module: str, name: str, constants: dict[str, object], types: dict[str, str]
) -> None:
    arguments = module, name, repr(constants), repr(types)
    command = [sys.executable, "-c", _SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
