"""Pages full of tokens, and bits instead of numbers, for the codec's tests."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import codec
from codec import cpu, reference
from codec.ops import Backend

BACKENDS: dict[str, Backend] = {"reference": reference, "cpu": cpu}
STALE = 0x7FC1
"""The pattern, a NaN, of slots that hold no token."""


def bits(tensor: Tensor) -> Tensor:
    """The patterns of a bf16 tensor: NaNs compare too."""
    return tensor.contiguous().view(torch.int16)


def from_bits(patterns: Tensor) -> Tensor:
    return patterns.to(torch.int16).view(torch.bfloat16)


@dataclass(frozen=True)
class Pages:
    """Planes `[page, kv_head, slot, dim]` of which `num_tokens` in `ids` are valid."""

    planes: list[Tensor]
    ids: list[int]
    num_tokens: int
    generator: torch.Generator = field(repr=False)

    @property
    def bound(self) -> int:
        """Of a segment with codebooks of any slot size."""
        return self.bound_with(None)

    def bound_with(self, slot_bytes: int | None) -> int:
        _, heads, slots, dim = self.planes[0].shape
        return codec.max_segment_bytes(
            len(self.planes), heads, dim, self.num_tokens, slots, slot_bytes
        )

    def content(self) -> Tensor:
        """Patterns `[plane, kv_head, token, dim]`."""
        _, heads, _, dim = self.planes[0].shape
        tokens = [bits(plane[self.ids]).transpose(0, 1) for plane in self.planes]
        return torch.stack([t.reshape(heads, -1, dim)[:, : self.num_tokens] for t in tokens])

    def empty_like(self) -> "Pages":
        """Other pages of the same pool size, all stale, under other ids."""
        planes = [from_bits(torch.full_like(bits(plane), STALE)) for plane in self.planes]
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
) -> Pages:
    """Random pages.

    Args:
        kind: `normal`, `random` patterns, `mixed` of both by page and head, or how many elements
            have an exponent outside 114 to 129.
    """
    generator = torch.Generator().manual_seed(num_tokens * 1009 + dim)
    needed = -(-num_tokens // slots)
    shape = (needed + 3, kv_heads, slots, dim)
    ids = torch.randperm(shape[0], generator=generator)[:needed].tolist()
    planes = []
    for _ in range(num_planes):
        plane = _content(shape, kind, generator)
        stale = from_bits(torch.full_like(bits(plane), STALE))
        for number, page in enumerate(ids):
            used = min(slots, num_tokens - number * slots)
            stale[page, :, :used] = plane[page, :, :used]
        planes.append(stale)
    return Pages(planes, ids, num_tokens, generator)


def _content(shape: tuple[int, ...], kind: str | float, generator: torch.Generator) -> Tensor:
    random = from_bits(torch.randint(-(2**15), 2**15, shape, generator=generator))
    if kind == "random":
        return random
    if isinstance(kind, float):
        inside = torch.randint(114, 130, shape, generator=generator)
        outside = torch.randint(0, 240, shape, generator=generator)
        outside += 16 * (outside >= 114)
        escaped = torch.rand(shape, generator=generator) < kind
        exponents = torch.where(escaped, outside, inside)
        return from_bits(bits(random).to(torch.int64) & 0x807F | exponents << 7)
    normal = torch.randn(shape, generator=generator).bfloat16()
    wild = torch.rand((*shape[:2], 1, 1), generator=generator) < 0.3
    return normal if kind == "normal" else torch.where(wild, random, normal)
