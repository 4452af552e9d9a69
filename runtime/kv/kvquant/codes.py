"""Codes of vectors: non-uniform levels, scales of channels and of tokens, and exact outliers.

A stored vector does not depend on the other vectors of a call: all operations are elementwise,
maxima or sorts of a vector's own elements.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.kv.transforms import pack, unpack

NAME = "kvquant"
BITS = 3, 4
"""Supported bits of a code."""
WIDTH_MULTIPLE = 8
"""Vectors have a multiple of this many elements, so that codes of 3 bits fill whole bytes."""
MAX_WIDTH = 256
"""Largest number of elements of a vector: an index of an outlier is one byte."""
MAX_OUTLIERS = 4
"""Largest number of outliers of a vector."""
_LARGEST = 1e30
"""Bound of normalized elements, so that their scales and losses stay finite."""


class Coded(NamedTuple):
    """Stored form of vectors.

    Attributes:
        codes: uint8 ``[..., width * bits / 8]``.
        scale: bf16 ``[..., 1]``, scale of the vector; 1 without scales of tokens.
        outliers: bf16 ``[..., k]``, exact elements.
        indices: uint8 ``[..., k]``, their channels.
    """

    codes: Tensor
    scale: Tensor
    outliers: Tensor
    indices: Tensor


class Analyzed(NamedTuple):
    """Vectors before they are packed.

    Attributes:
        z: fp32 ``[..., width]``, normalized elements.
        codes: uint8 ``[..., width]``, indices of the nearest levels.
        scale: bf16 ``[..., 1]``, scale of the vector; 1 without scales of tokens.
        outliers: int64 ``[..., k]``, indices of the outliers.
    """

    z: Tensor
    codes: Tensor
    scale: Tensor
    outliers: Tensor


@dataclass(frozen=True)
class VectorCode:
    """Quantization of the vectors of one layer, K or V.

    An element x of channel j is normalized to ``z = (x - mean_j) / scale_j``. With scales of
    tokens, z is divided by the largest magnitude of the vector's normalized elements that are not
    outliers. A code is the index of the nearest level.

    The ``outliers`` elements of a vector with the largest loss are stored as bf16. The loss is
    ``weight_j |z - level|``, or with scales of tokens ``|z|``, since the scale depends on it.

    Attributes:
        mean, scale, weight: fp32 ``[heads, width]``; ``weight`` is that of an error of z.
        levels: fp32 ``[2 ** bits]``, ascending.
        outliers: number of outliers of a vector.
        by_token: whether each vector has a scale.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    levels: Tensor
    outliers: int
    by_token: bool

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.levels) - 1).bit_length()

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return self.mean.shape[1]

    def analyze(self, x: Tensor) -> "Analyzed":
        """Normalize finite vectors and choose their levels and outliers.

        Args:
            x: fp32 ``[p, heads, n, width]``.
        """
        z = (x - self.mean[:, None]) / self.scale[:, None]
        z = z.clamp(-_LARGEST, _LARGEST)
        scale = torch.ones_like(z[..., :1], dtype=torch.bfloat16)
        if self.by_token:
            chosen = _largest(z.abs(), self.outliers)
            scale = z.abs().scatter(-1, chosen, 0.0).amax(dim=-1, keepdim=True).to(torch.bfloat16)
            step = scale.float()
            z = torch.where(step > 0, z / step, 0.0)
        codes = torch.bucketize(z, edges_of(self.levels)).to(torch.uint8)
        if not self.by_token:
            loss = (z - self.levels[codes.long()]).abs() * self.weight[:, None]
            chosen = _largest(loss, self.outliers)
        return Analyzed(z, codes, scale, chosen)

    def encode(self, x: Tensor) -> Coded:
        """Encode finite vectors, fp32 ``[p, heads, n, width]``."""
        _, codes, scale, chosen = self.analyze(x)
        outliers = x.gather(-1, chosen).to(torch.bfloat16)
        return Coded(pack_codes(codes, self.bits), scale, outliers, chosen.to(torch.uint8))

    def decode(self, coded: Coded) -> Tensor:
        """Return the vectors, fp32 ``[p, heads, n, width]``."""
        z = self.levels[unpack_codes(coded.codes, self.bits).long()] * coded.scale.float()
        x = z * self.scale[:, None] + self.mean[:, None]
        return x.scatter(-1, coded.indices.long(), coded.outliers.float())


def edges_of(levels: Tensor) -> Tensor:
    """Return the edges between ascending levels; a value at an edge has the lower level."""
    return (levels[1:] + levels[:-1]) / 2


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 3 or 4 bits, uint8 ``[..., width]``.

    Codes of 3 bits are the 2 low bits of all codes, then the high bits of all codes, each as
    `runtime.kv.transforms.pack` packs them.
    """
    if bits == 3:
        return torch.cat((pack(codes & 3, 2), pack(codes >> 2, 1)), dim=-1)
    return pack(codes, bits)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes that `pack_codes` packed, uint8 ``[..., width]``."""
    if bits == 3:
        low = packed.shape[-1] * 2 // 3
        return unpack(packed[..., :low], 2) | unpack(packed[..., low:], 1) << 2
    return unpack(packed, bits)


def _largest(x: Tensor, count: int) -> Tensor:
    """Return the indices of the largest elements of vectors in descending order, ``[..., count]``.

    Of equal elements, the first one comes first. Elements are not NaN, and at least 0.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]
