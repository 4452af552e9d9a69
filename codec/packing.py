"""How the reference takes bytes apart and puts them together, a whole plane at a time."""

import torch
from torch import Tensor

from codec.format import CHUNK, WORD, WORDS


def inside(sizes: Tensor, width: int = CHUNK) -> Tensor:
    """bool `[chunks, width]`: which positions lie before each size."""
    return torch.arange(width, device=sizes.device) < sizes[:, None]


def words_of(lengths: Tensor) -> Tensor:
    """How many words chunks of these lengths have."""
    return (lengths + WORD - 1) // WORD


def padded(lengths: Tensor) -> Tensor:
    return WORD * words_of(lengths)


def starts_of(sizes: Tensor) -> Tensor:
    """Where each of consecutive parts of these sizes starts."""
    return sizes.cumsum(0) - sizes


def write_values(out: Tensor, at: int, used: Tensor, values: Tensor, width: int) -> None:
    """Write the used ones of `values`, in `width` bytes each, from byte `at` on."""
    data = torch.stack([values[used] >> 8 * byte for byte in range(width)], dim=1) & 0xFF
    out[at : at + data.numel()] = data.reshape(-1).to(torch.uint8)


def read_values(data: Tensor, at: int, used: Tensor, width: int) -> Tensor:
    """The inverse of `write_values`; int64, zero where nothing is used."""
    count = int(used.sum())
    values = torch.zeros(used.shape, dtype=torch.int64, device=data.device)
    values[used] = integers(data[at : at + width * count].view(count, width))
    return values


def integers(data: Tensor) -> Tensor:
    """`[..., bytes]` → int64 `[...]`."""
    parts = [data[..., byte].to(torch.int64) << 8 * byte for byte in range(data.shape[-1])]
    return torch.stack(parts).sum(0)


def join_words(elements: Tensor, bits: int) -> Tensor:
    """`[chunks, CHUNK]` values of so many bits → words `[chunks, WORDS]`: e0, e2, e1, e3."""
    e = elements.view(len(elements), WORDS, WORD)
    return e[..., 0] | e[..., 2] << bits | e[..., 1] << 2 * bits | e[..., 3] << 3 * bits


def split_words(words: Tensor, bits: int) -> Tensor:
    """The inverse of `join_words`."""
    parts = [words >> shift * bits & (1 << bits) - 1 for shift in (0, 2, 1, 3)]
    return torch.stack(parts, dim=-1).flatten(1)


def put(out: Tensor, at: Tensor, values: Tensor, width: int) -> None:
    """Write each value in `width` bytes at its place."""
    for byte in range(width):
        out[at + byte] = (values >> 8 * byte & 0xFF).to(torch.uint8)


def get(data: Tensor, at: Tensor, width: int) -> Tensor:
    """The inverse of `put`."""
    return integers(data[at[..., None] + torch.arange(width, device=data.device)])
