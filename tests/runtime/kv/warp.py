"""Emulation of one warp that runs the Gluon functions of `runtime.kv.kernels.fragments` on a CPU.

Gluon has no interpreter. These functions have one element per lane in each tensor, so that they run
unchanged on numpy arrays of 32 lanes, with inline PTX executed one instruction at a time for all
lanes. `loaded` imports a module of such functions; `Memory` holds what their pointers refer to.
"""

import builtins
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_loader
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LANES = 32
_G, _T = np.divmod(np.arange(LANES), 4)
Words = NDArray[np.uint32]


class Lanes(np.ndarray[Any, Any]):
    """A tensor with one element per lane, or one element for all lanes."""

    def to(self, dtype: Any, *, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else self.astype(dtype)

    def __imul__(self, other: Any) -> Any:  # type: ignore[misc]
        return self * other  # may have more lanes


def lanes(values: Any, dtype: Any = None) -> Lanes:
    """Return values, one or one for each lane, as a tensor."""
    return np.atleast_1d(np.asarray(values, dtype=dtype)).view(Lanes)


class Memory:
    """Global memory. Address 0 is not used."""

    def __init__(self) -> None:
        self.bytes = np.zeros(256, np.uint8)

    def add(self, *tensors: Tensor) -> list["Pointer"]:
        """Copy tensors, which may be views of one storage, and return their addresses."""
        storage = tensors[0].untyped_storage()
        assert all(t.untyped_storage().data_ptr() == storage.data_ptr() for t in tensors)
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        begin = -(-len(self.bytes) // 256) * 256
        padding = np.zeros(begin - len(self.bytes), np.uint8)
        self.bytes = np.concatenate((self.bytes, padding, whole.numpy()))
        starts = [begin + t.storage_offset() * t.element_size() for t in tensors]
        return [
            Pointer(lanes(start, np.int64), tensor.dtype)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def read(self, addresses: Any, count: int) -> Any:
        """Return ``count`` bytes from each address, `[lanes, count]`."""
        each = np.broadcast_to(np.asarray(addresses), LANES)
        assert each.min() > 0
        assert each.max() + count <= len(self.bytes)
        assert not (each % count).any(), "the load is not aligned"
        return self.bytes[each[:, None] + np.arange(count)]


@dataclass(frozen=True)
class Pointer:
    """Addresses of elements of one dtype."""

    addresses: Lanes
    element: torch.dtype

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.element)

    def __add__(self, offset: Any) -> "Pointer":
        distance = lanes(offset).astype(np.int64) * self.element.itemsize
        return Pointer(lanes(self.addresses + distance), self.element)

    def to(self, dtype: Any) -> Lanes:
        assert dtype is np.int64
        return self.addresses


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


_OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "not.b32": lambda a: ~a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "sub.u32": lambda a, b: a - b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
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


def _multiply(registers: list[Words], dtype: torch.dtype) -> list[Words]:
    """Return the words of A B + C for mma.m16n8k16, from those of A, B and C."""
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i, word in enumerate(registers[:4]):
        rows, columns = _G + 8 * (i % 2), 2 * _T + 8 * (i // 2)
        a[rows, columns], a[rows, columns + 1] = halves(word, dtype).T
    for i, word in enumerate(registers[4:6]):
        b[2 * _T + 8 * i, _G], b[2 * _T + 8 * i + 1, _G] = halves(word, dtype).T
    for i, word in enumerate(registers[6:]):
        c[_G + 8 * (i // 2), 2 * _T + i % 2] = word.view(np.float32)
    found = (a @ b + c).astype(np.float32)
    return [found[_G + 8 * (i // 2), 2 * _T + i % 2].view(np.uint32) for i in range(4)]


def run_ptx(memory: Memory, text: str, outputs: int, inputs: list[Any]) -> list[Words]:
    """Run a block of PTX in all lanes and return its outputs."""
    registers: dict[str, Any] = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    body = text.strip()
    if body.startswith("{"):
        body = body[1:-1]
    for line in filter(None, map(str.strip, body.split(";"))):
        operation, operands = line.split(None, 1)
        if operation == ".reg":
            continue
        names = re.findall(r"[$\w-]+", operands)
        values = [registers[x] if x in registers else _immediate(x) for x in names]
        if operation.startswith("ld.global.nc"):
            *targets, _ = names
            read = memory.read(values[-1], 4 * len(targets)).view(np.uint32)
            registers |= dict(zip(targets, read.T.copy(), strict=True))
        elif operation.startswith("mma.sync"):
            dtype = torch.bfloat16 if ".bf16." in operation else torch.float16
            registers |= dict(zip(names[:4], _multiply(values[4:], dtype), strict=True))
        elif operation == "mov.b32" and operands.startswith("{"):
            registers |= {names[0]: values[2] & 0xFFFF, names[1]: values[2] >> 16}
        else:
            registers[names[0]] = _OPERATIONS[operation](*values[1:])
    return [registers[f"${i}"] for i in range(outputs)]


def _immediate(text: str) -> Any:
    is_number = text.isdigit() or text.startswith("0x")
    return np.full(LANES, int(text, 0), np.uint32) if is_number else None


class _Language(ModuleType):
    """Replacement of `triton.experimental.gluon.language` that computes on numpy arrays."""

    int32, int64, float32, float8e5 = np.int32, np.int64, np.float32, torch.float8_e5m2
    static_range = builtins.range

    def __init__(self, memory: Memory) -> None:
        super().__init__("language")
        self._memory = memory

    class constexpr:
        def __new__(cls, value: Any) -> Any:
            return value

    @staticmethod
    def BlockedLayout(*_: Any) -> None:
        return None

    @staticmethod
    def arange(begin: int, end: int, _layout: Any) -> Lanes:
        return lanes(np.arange(begin, end), np.int32)

    where = staticmethod(lambda c, a, b: lanes(np.where(c, a, b)))
    maximum = staticmethod(lambda a, b: lanes(np.fmax(a, b)))
    minimum = staticmethod(lambda a, b: lanes(np.fmin(a, b)))
    exp2 = staticmethod(lambda x: lanes(np.exp2(x)))

    def load(self, pointer: Pointer) -> Lanes:
        size = pointer.element.itemsize
        raw = torch.from_numpy(self._memory.read(pointer.addresses, size).copy())
        return lanes(raw.view(pointer.element).numpy().reshape(-1))

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: list[Any], *, dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        assert is_pure
        assert pack == 1
        inputs = [_register(x) for x in args]
        kinds = dtype if isinstance(dtype, tuple) else (dtype,)
        assert constraints.count("=") == len(kinds)
        words = map(np.ascontiguousarray, run_ptx(self._memory, asm, len(kinds), inputs))
        found = tuple(lanes(word).view(kind) for word, kind in zip(words, kinds, strict=True))
        return found if isinstance(dtype, tuple) else found[0]


def _register(value: Any) -> Any:
    whole = np.broadcast_to(np.asarray(value), LANES).copy()
    return whole if whole.dtype == np.int64 else whole.view(np.uint32)


def _jit(function: Any = None, **_: Any) -> Any:
    """Return the function itself; also used as ``jit(**options)``."""
    return function or _jit


@contextmanager
def loaded(memory: Memory, *names: str) -> Iterator[list[ModuleType]]:
    """Import modules of Gluon functions, so that these run on numpy arrays."""
    language = _Language(memory)
    gluon = ModuleType("gluon")
    vars(gluon).update(jit=_jit, language=language)
    experimental = ModuleType("experimental")
    vars(experimental)["gluon"] = gluon
    fakes = {
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
    }
    found = []
    with patch.dict(sys.modules, fakes):
        for name in names:
            spec = find_spec(name)
            assert spec is not None
            assert spec.loader is not None
            module = module_from_spec(spec_from_loader(name, spec.loader) or spec)
            sys.modules[name] = module
            vars(module)["range"] = lambda *bounds: builtins.range(*map(int, bounds))
            spec.loader.exec_module(module)
            found.append(module)
        yield found
