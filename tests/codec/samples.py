"""Codebooks, pages and bit patterns for the codec's tests."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import codec
from codec.backend import Backend
from codec.cpu import backend as cpu
from codec.elements import BY_NAME, FLOAT_TYPES, ElementType, element_of
from codec.format import Mode
from codec.reference import backend as reference

BACKENDS: dict[str, Backend] = {"reference": reference, "cpu": cpu}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STALE = {1: 0x7F, 2: 0x7FC1, 4: 0x7FC1_7FC1, 8: 0x7FC1_7FC1_7FC1_7FC1}
"""Bit pattern of slots without a token, by element size in bytes. As floating point it is a NaN."""


def modes_of(element: ElementType) -> list[Mode]:
    """Return the modes with codes that a type supports."""
    return [mode for mode in Mode if mode and mode.supports(element)]


def window(element: ElementType, mode: Mode) -> codec.Codebook:
    """Return a codebook of consecutive exponents around that of 1.0.

    Up to fifteen lower exponents have second-level codes.
    """
    top = element.exponents // 2 + 2
    first = top - mode.codes
    second = range(max(0, first - 15), first) if mode.has_escape_code else ()
    return codec.Codebook(tuple(range(first, top)), mode, tuple(second), element.dtype)


def gaps(element: ElementType, mode: Mode) -> codec.Codebook:
    """Return a codebook of the lowest exponent, some around that of 1.0, and the highest."""
    top = element.exponents // 2 + 2
    exponents = (0, *range(top - mode.codes + 2, top), element.exponents - 1)
    second = (1, 2, top) if mode.has_escape_code else ()
    return codec.Codebook(exponents, mode, second, element.dtype)


BOOKS = {
    f"{element.name}-{mode.name.lower()}-{kind.__name__}": kind(element, mode)
    for element in FLOAT_TYPES
    for mode in modes_of(element)
    for kind in (window, gaps)
}
BOOK = BOOKS["bf16-top16-window"]
EVERY: dict[str, codec.Codebook | None] = {**BOOKS, **dict.fromkeys(BY_NAME)}
"""`BOOKS`, and None (raw storage) for each element type, under the type's name."""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of planes for a name in `EVERY`."""
    return BY_NAME[name.split("-")[0]].dtype


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bit patterns as integers of the same size, so that NaNs compare equal."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def from_bits(patterns: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return patterns.to(_INTEGERS[dtype.itemsize]).view(dtype)


def stale_like(plane: Tensor) -> Tensor:
    return from_bits(torch.full_like(bits(plane), STALE[plane.element_size()]), plane.dtype)


@dataclass(frozen=True)
class Pages:
    """Planes `[page, kv_head, slot, dim]` with `num_tokens` valid tokens in the pages `ids`."""

    planes: list[Tensor]
    ids: list[int]
    num_tokens: int
    generator: torch.Generator = field(repr=False)

    @property
    def bound(self) -> int:
        _, heads, slots, dim = self.planes[0].shape
        element = element_of(self.planes[0].dtype)
        return codec.max_segment_bytes(
            len(self.planes), heads, dim, self.num_tokens, slots, element
        )

    def content(self) -> Tensor:
        """Return the bit patterns of the tokens, `[plane, kv_head, token, dim]`."""
        _, heads, _, dim = self.planes[0].shape
        tokens = [bits(plane)[self.ids].transpose(0, 1) for plane in self.planes]
        return torch.stack([t.reshape(heads, -1, dim)[:, : self.num_tokens] for t in tokens])

    def empty_like(self) -> "Pages":
        """Return pages of the same shape without content, with other page ids."""
        planes = [stale_like(plane) for plane in self.planes]
        order = torch.randperm(len(self.planes[0]), generator=self.generator).tolist()
        return Pages(planes, order[: len(self.ids)], self.num_tokens, self.generator)


def make_pages(
    num_tokens: int,
    *,
    num_planes: int = 2,
    kv_heads: int = 3,
    slots: int = 16,
    dim: int = 64,
    kind: str | float = "normal",
    book: codec.Codebook = BOOK,
    dtype: torch.dtype | None = None,
) -> Pages:
    """Return random pages.

    Args:
        kind: "normal" values, "random" bit patterns, "mixed" (normal or random for each page and
            head), or the fraction of escapes, about half of them with a second-level code.
        dtype: dtype of the planes; the codebook's by default.
    """
    generator = torch.Generator().manual_seed(num_tokens * 1009 + dim)
    needed = -(-num_tokens // slots)
    shape = (needed + 3, kv_heads, slots, dim)
    ids = torch.randperm(shape[0], generator=generator)[:needed].tolist()
    planes = []
    for _ in range(num_planes):
        plane = bits(_content(shape, kind, book, dtype or book.dtype, generator))
        stale = torch.full_like(plane, STALE[plane.element_size()])
        for number, page in enumerate(ids):
            used = min(slots, num_tokens - number * slots)
            stale[page, :, :used] = plane[page, :, :used]
        planes.append(from_bits(stale, dtype or book.dtype))
    return Pages(planes, ids, num_tokens, generator)


def _content(
    shape: tuple[int, ...],
    kind: str | float,
    book: codec.Codebook,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    random = random_patterns(shape, dtype, generator)
    if isinstance(kind, float):
        return with_escapes(random, kind, book, generator)
    if kind == "random":
        return from_bits(random, dtype)
    normal = bits(torch.randn(shape, generator=generator).to(dtype))
    wild = torch.rand((*shape[:2], 1, 1), generator=generator) < 0.3
    return from_bits(normal if kind == "normal" else torch.where(wild, random, normal), dtype)


def random_patterns(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """Return uniformly distributed bit patterns of a dtype, int64."""
    low, high = (0, 1 << 8 * dtype.itemsize) if dtype.itemsize < 8 else (-(1 << 63), (1 << 63) - 1)
    return torch.randint(low, high, shape, generator=generator)


def with_escapes(
    patterns: Tensor, share: float, book: codec.Codebook, generator: torch.Generator
) -> Tensor:
    """Return `patterns` with new exponents, of which a fraction `share` has no code."""
    element = book.element
    others = sorted(set(range(element.exponents)) - set(book.exponents))
    others += list(book.second) * (len(others) // max(len(book.second), 1))

    def drawn(exponents: list[int]) -> Tensor:
        index = torch.randint(0, len(exponents), patterns.shape, generator=generator)
        return torch.tensor(exponents)[index]

    escaped = torch.rand(patterns.shape, generator=generator) < share
    exponents = torch.where(escaped, drawn(others), drawn([*book.exponents]))
    rests = patterns & ~(element.exponents - 1 << element.mantissa_bits)
    return from_bits(rests | exponents << element.mantissa_bits, book.dtype)
