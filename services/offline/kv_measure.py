"""Measurements of `headrace kv-statistics`: exponents and compression ratios of KV."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import codec
from codec import Codebook, Mode
from codec.calibrate import Histogram

MODES = {"top16": Mode.TOP16, "in-band": Mode.INBAND, "three-bit": Mode.THREE_BIT}
PICKED = "calibrated"
"""Key in `KVStatistics.total`: each plane uses the mode that calibration picked."""
_ELEMENT_BITS = 16

Planes = Mapping[tuple[int, str], Tensor]


@dataclass(frozen=True)
class Coding:
    """Compression result of one set of codebooks, on KV that they were not calibrated on.

    Attributes:
        escapes: fraction of the elements whose exponent has no code.
        listed: fraction of the elements whose exponent has no second-level code either. Each of
            them takes one word in a list.
        payload_bytes: size of the encoded segment: header, starts, streams, entries, padding.
        ratio: bytes before encoding / `payload_bytes`.
    """

    escapes: float
    listed: float
    payload_bytes: int
    ratio: float


@dataclass(frozen=True)
class PlaneStatistics:
    """Statistics of K or V of one layer. Each mode is measured in a separate segment.

    Attributes:
        layer: index of the layer.
        plane: "k" or "v".
        exponents: biased exponent → number of occurrences in the test text.
        entropy_ratio: order-0 bound, 16 / (entropy of `exponents` + 8 bits of sign and mantissa).
        picked: mode that calibration picked, a key of `codings`.
        codings: mode → result.
    """

    layer: int
    plane: str
    exponents: dict[int, int]
    entropy_ratio: float
    picked: str
    codings: dict[str, Coding]


@dataclass(frozen=True)
class KVStatistics:
    """Statistics of all planes, and of one segment that contains all of them.

    Attributes:
        calibration_tokens: number of tokens of the calibration text.
        test_tokens: number of tokens of the test text, which does not overlap the calibration text.
        planes: statistics of each plane.
        entropy_ratio: order-0 bound of all planes, 16 / mean bits per element of the planes.
        total: mode (or `PICKED`) → result of one segment that contains all planes.
    """

    calibration_tokens: int
    test_tokens: int
    planes: tuple[PlaneStatistics, ...]
    entropy_ratio: float
    total: dict[str, Coding]


def measure(calibration: Planes, test: Planes) -> KVStatistics:
    """Calibrate on one sample, then encode and decode another.

    Args:
        calibration: mapping (layer, "k" or "v") → ``[page, kv_head, slot, dim]`` of any floating
            dtype, which is rounded to bf16. Every slot must hold a token.
        test: the same for another text, with the same keys.

    Raises:
        CodecError: if the tensors do not match, or if a payload does not decode to its content.
    """
    books: dict[str, list[Codebook]] = {
        name: [codec.calibrate(calibration[key], mode=mode) for key in test]
        for name, mode in (*MODES.items(), (PICKED, None))
    }
    tensors = rounded(test)
    histograms = [Histogram.of(tensor, torch.bfloat16) for tensor in tensors]
    names = {mode: name for name, mode in MODES.items()}
    planes = tuple(
        PlaneStatistics(
            *key,
            {exponent: count for exponent, count in enumerate(histogram.counts) if count},
            _ELEMENT_BITS / histogram.entropy_bits(),
            names[books[PICKED][at].mode],
            {name: _coding([tensor], [histogram], [books[name][at]]) for name in MODES},
        )
        for at, (key, tensor, histogram) in enumerate(zip(test, tensors, histograms, strict=True))
    )
    mean_bits = sum(histogram.entropy_bits() for histogram in histograms) / len(histograms)
    return KVStatistics(
        _tokens(calibration),
        _tokens(test),
        planes,
        _ELEMENT_BITS / mean_bits,
        {name: _coding(tensors, histograms, of_mode) for name, of_mode in books.items()},
    )


def rounded(planes: Planes) -> list[Tensor]:
    """Return the planes, rounded to bf16."""
    return [plane.to(torch.bfloat16) for plane in planes.values()]


def _tokens(planes: Planes) -> int:
    pages, _, slots, _ = next(iter(planes.values())).shape
    return pages * slots


def _coding(
    planes: Sequence[Tensor], histograms: Sequence[Histogram], books: Sequence[Codebook]
) -> Coding:
    """Encode the planes into one segment, and decode it to verify the result."""
    pages, heads, slots, dim = planes[0].shape
    tokens = pages * slots
    bound = codec.max_segment_bytes(len(planes), heads, dim, tokens, slots)
    payload = torch.empty(bound, dtype=torch.uint8)
    encoded = codec.encode_pages(planes, books, range(pages), tokens, payload)
    decoded = [torch.empty_like(plane) for plane in planes]
    codec.decode_pages(payload[: encoded.length], decoded, books, range(pages), tokens)
    elements = sum(histogram.total for histogram in histograms)
    listed = sum(
        histogram.total - sum(histogram.counts[e] for e in (*book.exponents, *book.second))
        for histogram, book in zip(histograms, books, strict=True)
    )
    return Coding(
        encoded.escapes / elements,
        listed / elements,
        encoded.length,
        encoded.raw_bytes / encoded.length,
    )
