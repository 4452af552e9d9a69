"""Codes of PCA coefficients of K in 2, 4, 6 or 8 bits, and their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from runtime.errors import CalibrationError
from runtime.kv.transforms import pack, unpack

STEPS = {2: 0.9957, 4: 0.4, 6: 0.12, 8: 0.035}
"""Quantization steps by bits, in standard deviations. The step of 2 bits is optimal for normal
coefficients (Max 1960, table II); the others are larger, as coefficients have heavier tails."""
LARGEST = 2.0**60
"""Largest magnitude of an element of K minus the mean that can be encoded."""
_NOT_FINITE = 0
"""Code of more than 2 bits that no finite coefficient has."""
_RUN_MULTIPLE = {2: 4, 4: 2, 6: 4, 8: 1}


@dataclass(frozen=True)
class Run:
    """Consecutive coefficients with the same number of bits.

    Attributes:
        coefficients: slice of the coefficients.
        stored: slice of the bytes that store them.
    """

    bits: int
    coefficients: slice
    stored: slice


def runs_of(bits: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs of coefficients with the given bits.

    Raises:
        CalibrationError: a number of bits is unknown, or a run does not fill whole bytes.
    """
    runs: list[Run] = []
    start = byte = 0
    for value, members in groupby(bits):
        count = len(list(members))
        if count % _RUN_MULTIPLE.get(value, count + 1):
            raise CalibrationError(f"{count} coefficients of {value} bits are not supported")
        size = count * value // 8
        runs.append(Run(value, slice(start, start + count), slice(byte, byte + size)))
        start, byte = start + count, byte + size
    if all(run.bits == 2 for run in runs):
        raise CalibrationError("at least one coefficient needs more than 2 bits")
    return tuple(runs)


def encode_coefficients(coefficients: Tensor, scales: Tensor, runs: Sequence[Run]) -> Tensor:
    """Quantize and pack coefficients.

    With b > 2 bits, code c > 0 stands for ``c - 2 ** (b - 1)`` steps. Code 0 is a marker: if any
    coefficient of a token is not finite, all its codes are 0, and those of more than 2 bits decode
    to NaN. With 2 bits, code c stands for ``c - 1.5`` steps, and there is no marker.

    Args:
        coefficients: fp32 ``[..., rank]``.
        scales: fp32 ``[rank]``, value of one step of each coefficient.

    Returns:
        uint8 ``[..., bytes]``.
    """
    finite = coefficients.isfinite().all(dim=-1, keepdim=True)
    steps = coefficients / scales
    parts = []
    for run in runs:
        own, zero = steps[..., run.coefficients], 2 ** (run.bits - 1)
        if run.bits == 2:
            codes = own.floor().clamp(-2, 1) + zero
        else:
            codes = own.round().clamp(1 - zero, zero - 1) + zero
        parts.append(_pack(torch.where(finite, codes, _NOT_FINITE).to(torch.uint8), run.bits))
    return torch.cat(parts, dim=-1)


def decode_steps(stored: Tensor, runs: Sequence[Run]) -> Tensor:
    """Return the coefficients in quantization steps, fp32 ``[..., rank]``.

    Args:
        stored: uint8 ``[..., bytes]``; bytes beyond those of the runs are ignored.
    """
    parts = []
    for run in runs:
        codes = _unpack(stored[..., run.stored], run.bits)
        zero = 2 ** (run.bits - 1)
        if run.bits == 2:
            parts.append(codes.float() - (zero - 0.5))
        else:
            parts.append(torch.where(codes == _NOT_FINITE, torch.nan, codes.float() - zero))
    return torch.cat(parts, dim=-1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, uint8 ``[..., n]``, into bytes.

    Of codes of 6 bits, the 4 low bits of all codes are packed first, then the 2 high bits of all.
    """
    if bits == 8:
        return codes
    if bits == 6:
        return torch.cat((pack(codes & 15, 4), pack(codes >> 4, 2)), dim=-1)
    return pack(codes, bits)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    if bits == 6:
        low = packed.shape[-1] * 2 // 3
        return unpack(packed[..., :low], 4) | unpack(packed[..., low:], 2) << 4
    return unpack(packed, bits)
