"""Emulation of a warp that runs the Gluon functions of `runtime.kv.kernels.fragments` on a CPU.

Gluon has no interpreter. These functions have one element per lane in each tensor, so that they run
unchanged on numpy arrays of 32 lanes, with inline PTX executed one instruction at a time for all
lanes. `loaded` imports a module of such functions; `Memory` holds what their pointers refer to. The
warps of a program run one after another, so that barriers and exchanges between them (`splits`) are
not emulated.
"""

import builtins
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_loader
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests.runtime.kv.ptx_operations import LANES, OPERATIONS, G, T, Words, halves, multiply


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
    """Global memory, whose address 0 is not used, and shared memory.

    Attributes:
        warp: number of the warp that runs.
    """

    def __init__(self) -> None:
        self.bytes = np.zeros(256, np.uint8)
        self.shared = np.zeros(1 << 15, np.uint8)
        self.warp = 0

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

    def write_shared(self, addresses: Any, words: Words) -> None:
        """Store words `[lanes, n]` at an address of each lane."""
        data = np.ascontiguousarray(words, dtype=np.uint32).view(np.uint8)
        self.shared[addresses[:, None].astype(np.int64) + np.arange(data.shape[1])] = data


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


def _multiply_group(memory: Memory, registers: list[Words], add: bool) -> list[Words]:
    """Return the words of C of one warp for wgmma.m64n128k32 with e4m3 A and B and fp16 C.

    Args:
        registers: words of C, words of A, and the descriptor of B.
        add: whether products are added to C.
    """
    *words, descriptor = registers
    c_words, a_words = words[:-4], words[-4:]
    dims = 4 * len(c_words)
    a, c = np.zeros((16, 32)), np.zeros((16, dims))
    for i, word in enumerate(a_words):
        codes = torch.from_numpy(word.view(np.uint8).reshape(LANES, 4))
        found = codes.view(torch.float8_e4m3fn).double().numpy()
        for byte in range(4):
            a[G + 8 * (i % 2), 4 * T + byte + 16 * (i // 2)] = found[:, byte]
    if add:
        for i, word in enumerate(c_words):
            rows, columns = G + 8 * (i % 2), 8 * (i // 2) + 2 * T
            c[rows, columns], c[rows, columns + 1] = halves(word, torch.float16).T
    number = int(descriptor[0])
    start, stride, swizzle = number % 2**14 * 16, (number >> 32) % 2**14 * 16, number >> 62
    assert swizzle == 2, "rows of 64 bytes"
    dim = np.arange(dims)[:, None]
    address = start + dim // 8 * stride + dim % 8 * 64 + np.arange(32)
    address ^= address >> 3 & 0x30
    b = torch.from_numpy(memory.shared[address]).view(torch.float8_e4m3fn).double().numpy()
    sums = torch.from_numpy(a @ b.T + c).half().numpy().view(np.uint16).astype(np.uint32)
    made = []
    for i in range(len(c_words)):
        rows, columns = G + 8 * (i % 2), 8 * (i // 2) + 2 * T
        made.append(sums[rows, columns] | sums[rows, columns + 1] << np.uint32(16))
    return made


def run_ptx(memory: Memory, text: str, outputs: int, inputs: list[Any]) -> list[Words]:
    """Run a block of PTX in all lanes and return its outputs."""
    registers: dict[str, Any] = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    body = text.strip()
    if body.startswith("{"):
        body = body[1:-1]
    for line in filter(None, map(str.strip, body.split(";"))):
        operation, _, operands = line.partition(" ")
        if operation.startswith(_NOT_EMULATED):
            continue
        if operation.startswith(("ld.global.nc", "st.shared")):
            _access(memory, registers, operation, operands)
            continue
        names = re.findall(r"[$\w-]+", operands)
        values = [registers[x] if x in registers else _immediate(x) for x in names]
        if operation.startswith("wgmma.mma_async"):
            made = _multiply_group(memory, values[:-3], add=bool(values[-3][0]))
            registers |= dict(zip(names, made, strict=False))
        elif operation.startswith("mma.sync"):
            dtype = torch.bfloat16 if ".bf16." in operation else torch.float16
            registers |= dict(zip(names[:4], multiply(values[4:], dtype), strict=True))
        elif operation == "mov.b32" and operands.startswith("{"):
            registers |= {names[0]: values[2] & 0xFFFF, names[1]: values[2] >> 16}
        else:
            registers[names[0]] = OPERATIONS[operation](*values[1:])
    return [registers[f"${i}"] for i in range(outputs)]


_NOT_EMULATED = ".reg", "bar.sync", "fence.", "wgmma.fence", "wgmma.commit", "wgmma.wait"


def _access(memory: Memory, registers: dict[str, Any], operation: str, operands: str) -> None:
    """Load words from global memory, or store words in shared memory."""
    found = re.search(r"\[([$\w]+)(?:\+(\d+))?\]", operands)
    assert found
    address = registers[found[1]] + int(found[2] or 0)
    names = re.findall(r"[$\w]+", operands.replace(found[0], ""))
    if operation.startswith("st."):
        memory.write_shared(address, np.stack([registers[x] for x in names], axis=1))
    else:
        read = memory.read(address, 4 * len(names)).view(np.uint32)
        registers |= dict(zip(names, read.T.copy(), strict=True))


def _immediate(text: str) -> Any:
    is_number = text.lstrip("-").isdigit() or text.startswith("0x")
    return np.full(LANES, int(text, 0) % 2**32, np.uint32) if is_number else None


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

    def arange(self, begin: int, end: int, _layout: Any) -> Lanes:
        """Return numbers of threads of the warp that runs."""
        return lanes(np.arange(begin, min(end, LANES)) + LANES * self._memory.warp, np.int32)

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
