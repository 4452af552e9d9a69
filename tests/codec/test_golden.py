"""Golden vectors: segments that every implementation of wire version 3 must write and read.

Their content is a function of the element index, so that other implementations can reproduce it. A
vector may change only together with `WIRE_VERSION`.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import codec
from codec import checksum
from codec.backend import Backend
from codec.elements import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    ElementType,
    element_of,
    unit_view,
)
from codec.format import Mode
from codec.mix import mix64
from tests.codec.plain import KEYS, Segment, column_term
from tests.codec.samples import bits, from_bits

GOLDEN = Path(__file__).parent / "golden"
GAPS = (0, *range(3, 17), 31)
BOOKS = {
    "top16": codec.Codebook(tuple(range(114, 130))),
    "gaps": codec.Codebook((3, *range(114, 128), 250)),
    "in-band": codec.Codebook(tuple(range(115, 130)), Mode.INBAND, (0, *range(101, 115))),
    "three-bit": codec.Codebook(tuple(range(122, 129)), Mode.THREE_BIT, (0, 119, 120, 121, 129)),
    "fp16-top16": codec.Codebook(tuple(range(2, 18)), dtype=FP16.dtype),
    "fp16-in-band": codec.Codebook(tuple(range(3, 18)), Mode.INBAND, (0, 1, 2), FP16.dtype),
    "fp16-three-bit": codec.Codebook(
        (0, *range(12, 18)), Mode.THREE_BIT, tuple(range(1, 12)), FP16.dtype
    ),
    "e5m2-top16": codec.Codebook(GAPS, dtype=E5M2.dtype),
    "e5m2-in-band": codec.Codebook(tuple(range(3, 18)), Mode.INBAND, (0, 1, 2), E5M2.dtype),
    "e5m2-three-bit": codec.Codebook(
        tuple(range(11, 18)), Mode.THREE_BIT, tuple(range(1, 11)), E5M2.dtype
    ),
    "e4m3-three-bit": codec.Codebook(
        tuple(range(3, 10)), Mode.THREE_BIT, (0, 1, 2, 10), E4M3.dtype
    ),
}
FLAT: dict[str, tuple[str | ElementType, int, int]] = {
    # codebook, or element type if raw; number of elements; distance between escapes
    "empty": ("top16", 0, 29),
    "flat": ("top16", 77, 29),
    "list": ("top16", 1100, 29),
    "full": ("top16", 98, 4),
    "gaps": ("gaps", 100, 9),
    "in-band": ("in-band", 300, 11),
    "three-bit": ("three-bit", 300, 9),
    "many-escapes": ("three-bit", 1100, 5),
    "fp16-top16": ("fp16-top16", 500, 41),
    "fp16-in-band": ("fp16-in-band", 500, 23),
    "fp16-three-bit": ("fp16-three-bit", 200, 17),
    "e5m2-top16": ("e5m2-top16", 500, 47),
    "e5m2-in-band": ("e5m2-in-band", 500, 23),
    "e5m2-three-bit": ("e5m2-three-bit", 300, 17),
    "e4m3-three-bit": ("e4m3-three-bit", 300, 41),
    "fp16-full": ("fp16-top16", 98, 4),
    "e5m2-full": ("e5m2-three-bit", 98, 2),
    "e4m3-full": ("e4m3-three-bit", 98, 4),
    "raw": (BF16, 77, 29),
    "raw-fp16": (FP16, 77, 29),
    "raw-e5m2": (E5M2, 77, 29),
    "raw-e4m3": (E4M3, 77, 29),
    "raw-uint8": (UINT8, 77, 29),
    "raw-int8": (INT8, 77, 29),
    "raw-int16": (INT16, 77, 29),
    "raw-int32": (INT32, 77, 29),
    "raw-int64": (INT64, 77, 29),
}
CHECKSUMS = {
    "empty": 0x0000000000000000,
    "flat": 0xEA1C6BDF46A3F0BB,
    "list": 0x6C75970FE172515E,
    "full": 0x62580F7D8DDE8AD3,
    "gaps": 0xB1D5B88D044D6262,
    "in-band": 0x8794499432CA7F80,
    "three-bit": 0x0D9AB044FCF27154,
    "many-escapes": 0x62B3394ABA74D942,
    "fp16-top16": 0xDBF4018D71B2B77E,
    "fp16-in-band": 0xAA8DCD10B2D00743,
    "fp16-three-bit": 0x79267DBF84B16D96,
    "e5m2-top16": 0x87C60A0C4C9371CD,
    "e5m2-in-band": 0xD741C11A0C1BE561,
    "e5m2-three-bit": 0x8214FA63FBF15D81,
    "e4m3-three-bit": 0x0A99FE898EBD3FCA,
    "fp16-full": 0xF0191E6FC248C41F,
    "e5m2-full": 0xFB74C2C07C37AB48,
    "e4m3-full": 0xFA727CC0D6188006,
    "raw": 0xCD3D8345A9CEBCB7,
    "raw-fp16": 0xD67D7E705826AEB5,
    "raw-e5m2": 0x9C99E3778A642E8E,
    "raw-e4m3": 0x0855A93FAC7B7D8E,
    "raw-uint8": 0x2272A505428B5BBF,
    "raw-int8": 0x2272A505428B5BBF,
    "raw-int16": 0xEE1F23CA5803D720,
    "raw-int32": 0x0F26079EF2074565,
    "raw-int64": 0x3D7A52A9C23DF84A,
    "paged": 0x506730370E51FAF4,
}
ENTRY_WORDS: dict[str, list[list[int]]] = {
    "empty": [[]],
    "flat": [[2]],
    "list": [[31, 2]],
    "full": [[16]],
    "gaps": [[11]],
    "in-band": [[27]],
    "three-bit": [[36]],
    "many-escapes": [[160, 15]],
    "fp16-top16": [[6]],
    "fp16-in-band": [[10]],
    "fp16-three-bit": [[5]],
    "e5m2-top16": [[5]],
    "e5m2-in-band": [[10]],
    "e5m2-three-bit": [[9]],
    "e4m3-three-bit": [[3]],
    "fp16-full": [[4]],
    "e5m2-full": [[8]],
    "e4m3-full": [[4]],
    "raw": [],
    "raw-fp16": [],
    "raw-e5m2": [],
    "raw-e4m3": [],
    "raw-uint8": [],
    "raw-int8": [],
    "raw-int16": [],
    "raw-int32": [],
    "raw-int64": [],
    "paged": [[3, 1, 3, 1], [16, 2, 9, 2]],
}
"""Number of entry words of each chunk, for each plane with codes, by name of the vector."""
LARGE_SHA256 = "d5401015f53025b035733b4b5f87e637a92e482d977fc01a7b8e4c56350446e1"


def content(
    elements: int, element: ElementType, exponents: Sequence[int], every: int
) -> torch.Tensor:
    """Return the content of a vector.

    Sign and mantissa of element i are the low bits of 37 i. Its exponent is
    `exponents[i * i % len(exponents)]`, or 3 i if i + 1 is a multiple of `every`. An integer
    element is i * GOLDEN. Each value is reduced modulo its range.
    """
    i = torch.arange(elements)
    if not element.exponent_bits:
        return from_bits(i * (checksum.GOLDEN - (1 << 64)), element.dtype)
    exponent = torch.tensor(exponents)[i * i % len(exponents)]
    exponent = torch.where(i % every == every - 1, 3 * i % element.exponents, exponent)
    sign, mantissa = i * 37 >> element.mantissa_bits & 1, i * 37 & (1 << element.mantissa_bits) - 1
    patterns = (sign << element.exponent_bits | exponent) << element.mantissa_bits | mantissa
    return from_bits(patterns, element.dtype)


def paged() -> list[torch.Tensor]:
    """Return three planes `[3, 2, 16, 8]`. In the second, one head of one page is zero."""
    first = content(3 * 2 * 16 * 8, BF16, BOOKS["top16"].exponents, 29).view(3, 2, 16, 8)
    second = first.flip(0).clone()
    second[2, 0] = 0
    return [first, second, first.flip(1)]


def vector(
    name: str,
) -> tuple[list[torch.Tensor], list[codec.Codebook | None], list[int], int]:
    """Return the planes, codebooks, page ids and number of tokens of a vector."""
    if name == "paged":
        return paged(), [BOOKS["top16"], BOOKS["in-band"], None], [2, 1], 19
    coded, elements, every = FLAT[name]
    if isinstance(coded, str):
        book: codec.Codebook | None = BOOKS[coded]
        flat = content(elements, BOOKS[coded].element, BOOKS[coded].exponents, every)
    else:
        book = None
        flat = content(elements, coded, range(coded.exponents), every)
    return [flat.view(1, 1, elements, 1)], [book], [0] if elements else [], elements


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


@pytest.mark.parametrize("name", CHECKSUMS)
def test_golden_vectors_are_written_and_read(name: str, backend: Backend) -> None:
    tensors, books, pages, tokens = vector(name)
    _, heads, slots, dim = tensors[0].shape
    element = element_of(tensors[0].dtype)
    bound = codec.max_segment_bytes(len(tensors), heads, dim, tokens, max(slots, 1), element)
    out = torch.empty(bound, dtype=torch.uint8)
    encoded = codec.encode_pages(tensors, books, pages, tokens, out, backend=backend)
    assert out[: encoded.length].numpy().tobytes() == golden(name)
    assert encoded.checksum == CHECKSUMS[name]

    payload = torch.frombuffer(bytearray(golden(name)), dtype=torch.uint8)
    targets = [torch.zeros_like(plane) for plane in tensors]
    codec.decode_pages(payload, targets, books, pages, tokens, backend=backend)
    for plane, target in zip(tensors, targets, strict=True):
        assert torch.equal(valid(target, pages, tokens), valid(plane, pages, tokens))


def valid(plane: torch.Tensor, pages: list[int], tokens: int) -> torch.Tensor:
    """Return the stored bit patterns of the valid slots, `[kv_head, token, dim]`."""
    patterns = unit_view(plane)
    _, heads, _, dim = patterns.shape
    tokens_first = patterns[pages].transpose(0, 1).reshape(heads, -1, dim)[:, :tokens]
    return tokens_first.to(torch.int64) & (1 << 8 * patterns.element_size()) - 1


def read_with_plain_decoder(payload: bytes, books: list[codec.Codebook | None]) -> Segment:
    return Segment(payload, [(book.exponents, book.second) if book else None for book in books])


@pytest.mark.parametrize("name", CHECKSUMS)
def test_plain_python_decoder_reads_golden_vectors(name: str) -> None:
    tensors, books, pages, tokens = vector(name)
    segment = read_with_plain_decoder(golden(name), books)
    assert segment.entry_words == ENTRY_WORDS[name]
    assert segment.checksum % 2**64 == CHECKSUMS[name]
    for plane, elements in zip(tensors, segment.planes, strict=True):
        assert valid(plane, pages, tokens).flatten().tolist() == elements


def test_large_payload_has_the_golden_hash() -> None:
    book = BOOKS["top16"]
    payload = codec.encode(content(100_003, BF16, book.exponents, 29), book).numpy().tobytes()
    assert hashlib.sha256(payload).hexdigest() == LARGE_SHA256
    read_with_plain_decoder(payload, [book])


@pytest.mark.parametrize("elements", [1, 31, 32, 33, 1024, 1025, 2500])
def test_content_checksum_matches_its_definition(elements: int, backend: Backend) -> None:
    """Word k of a column of bf16 holds two elements of row k // 4."""
    tensor = content(elements, BF16, range(256), 29).view(1, 1, elements, 1)
    patterns = [pattern & 0xFFFF for pattern in bits(tensor).flatten().tolist()]
    total = 0
    for chunk, start in enumerate(range(0, elements, 1024)):
        own = patterns[start : start + 1024]
        columns = -(-len(own) // 32)
        own += [0] * (32 * columns - len(own))
        pairs = [low | high << 16 for low, high in zip(own[::2], own[1::2], strict=True)]
        for column in range(columns):
            words = [pairs[4 * (r * columns + column) + i] for r in range(4) for i in range(4)]
            total += column_term(words, chunk, column, 0)
    checksum = codec.checksum_pages([tensor], [0], elements, backend=backend)
    assert checksum == total % 2**64


def test_mix64_is_splitmix64_and_yields_the_keys() -> None:
    """Compare with the published first outputs of SplitMix64 from seed 0."""
    golden = 0x9E3779B97F4A7C15
    assert mix64(golden) == 0xE220A8397B1DCDAF
    assert mix64(2 * golden % 2**64) == 0x6E789E6AA1B965F4
    assert checksum.KEYS[:2] == (0xE220A839, 0x6E789E6B)
    assert list(checksum.KEYS) == KEYS
