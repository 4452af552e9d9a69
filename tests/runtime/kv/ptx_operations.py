"""PTX instructions on the registers of a warp, one word per lane, as numpy arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LANES = 32
G, T = np.divmod(np.arange(LANES), 4)
"""Numbers of each lane in fragments; see `runtime.kv.kernels.fragments`."""
Words = NDArray[np.uint32]


def halves(words: Words, dtype: torch.dtype) -> NDArray[np.float64]:
    """Return the low and the high number of each word, `[lanes, 2]`."""
    return torch.from_numpy(words.view(np.int16).copy()).view(dtype).double().numpy().reshape(-1, 2)


def rounded(numbers: NDArray[Any], dtype: torch.dtype) -> Words:
    """Round pairs of numbers to a 16-bit dtype and return them in words."""
    found = torch.from_numpy(np.ascontiguousarray(numbers)).to(dtype)
    return found.view(torch.int16).numpy().reshape(-1).view(np.uint32)


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    table = np.stack([(x >> 8 * i) & 255 for x in (a, b) for i in range(4)], axis=1)
    out = np.zeros(LANES, np.uint32)
    for i in range(4):
        nibble = (selector >> 4 * i) & 15
        byte = table[np.arange(LANES), nibble & 7]
        byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
        out |= byte << np.uint32(8 * i)
    return out


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    out = np.zeros(LANES, np.uint32)
    for i in range(8):
        term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        out |= np.where(table >> np.uint32(i) & 1 == 1, term, 0).astype(np.uint32)
    return out


def _pairwise(dtype: torch.dtype, function: Callable[..., Any]) -> Callable[..., Words]:
    return lambda *words: rounded(function(*(halves(x, dtype) for x in words)), dtype)


def _packed(dtype: torch.dtype) -> Callable[..., Words]:
    def pack(high: Words, low: Words) -> Words:
        pairs = np.stack((low.view(np.float32), high.view(np.float32)), axis=1)
        return rounded(pairs, dtype)

    return pack


def _transposed(word: Words) -> Words:
    matrix = word.view(np.uint16).reshape(8, 8)  # row g, columns 2 t and 2 t + 1
    return np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint32)


def _fp8(dtype: torch.dtype) -> Callable[..., Words]:
    def convert(pair: Words) -> Words:
        codes = torch.from_numpy(pair.astype(np.uint16).view(np.uint8).copy()).view(dtype)
        return rounded(codes.double().numpy().reshape(-1, 2), torch.float16)

    return convert


OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "mov.b64": lambda low, high: low | high.astype(np.uint64) << np.uint64(32),
    "add.s64": lambda a, b: a + b.astype(np.uint64),
    "setp.ne.b32": lambda a, b: a != b,
    "not.b32": lambda a: ~a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "sub.u32": lambda a, b: a - b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "sub.rn.bf16x2": _pairwise(torch.bfloat16, lambda a, b: a - b),
    "fma.rn.bf16x2": _pairwise(torch.bfloat16, lambda a, b, c: a * b + c),
    "add.rn.f16x2": _pairwise(torch.float16, lambda a, b: a + b),
    "neg.f16x2": _pairwise(torch.float16, lambda a: -a),
    "mul.rn.f16x2": _pairwise(torch.float16, lambda a, b: a * b),
    "fma.rn.f16x2": _pairwise(torch.float16, lambda a, b, c: a * b + c),
    "cvt.rn.bf16x2.f32": _packed(torch.bfloat16),
    "cvt.rn.f16x2.f32": _packed(torch.float16),
    "cvt.rn.f16x2.e4m3x2": _fp8(torch.float8_e4m3fn),
    "shfl.sync.bfly.b32": lambda a, mask, *_: a[np.arange(LANES) ^ mask],
    "movmatrix.sync.aligned.m8n8.trans.b16": _transposed,
}


def multiply(registers: list[Words], dtype: torch.dtype) -> list[Words]:
    """Return the words of A B + C for mma.m16n8k16, from those of A, B and C."""
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i, word in enumerate(registers[:4]):
        rows, columns = G + 8 * (i % 2), 2 * T + 8 * (i // 2)
        a[rows, columns], a[rows, columns + 1] = halves(word, dtype).T
    for i, word in enumerate(registers[4:6]):
        b[2 * T + 8 * i, G], b[2 * T + 8 * i + 1, G] = halves(word, dtype).T
    for i, word in enumerate(registers[6:]):
        c[G + 8 * (i // 2), 2 * T + i % 2] = word.view(np.float32)
    found = (a @ b + c).astype(np.float32)
    return [found[G + 8 * (i // 2), 2 * T + i % 2].view(np.uint32) for i in range(4)]
