"""What goes in comes out, bit for bit, and every backend writes the same bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import codec
from codec import cpu, reference
from codec.ops import Backend
from tests.codec.samples import BACKENDS, STALE, Pages, bits, from_bits, make_pages

TOKENS = [1, 2, 15, 16, 17, 31, 63, 100]
GEOMETRIES = [(16, 64), (16, 80), (16, 128), (16, 37), (5, 7), (1, 1)]


def encode(
    pages: Pages,
    codebook: codec.Codebook | None,
    backend: Backend | None = None,
) -> tuple[codec.Encoded, torch.Tensor]:
    """The segment of all planes, from a buffer that starts at an odd address."""
    buffer = torch.full((pages.bound + 1,), 0xA5, dtype=torch.uint8)
    encoded = codec.encode_pages(
        pages.planes,
        [codebook] * len(pages.planes),
        pages.ids,
        pages.num_tokens,
        buffer[1:],
        backend=backend,
    )
    return encoded, buffer[1 : 1 + encoded.length].clone()


@pytest.mark.parametrize("book", [range(114, 130), range(16), range(240, 256), None])
def test_every_pattern_survives(book: range | None) -> None:
    codebook = None if book is None else codec.Codebook(tuple(book))
    every = from_bits(torch.arange(-(2**15), 2**15))
    for order in (torch.arange(2**16), torch.randperm(2**16)):
        decoded = codec.decode(codec.encode(every[order], codebook), codebook)
        assert torch.equal(bits(decoded), bits(every[order]))


@pytest.mark.parametrize("kind", ["normal", "random", "mixed"])
@pytest.mark.parametrize(("slots", "dim"), GEOMETRIES)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_pages_round_trip_through_each_backend(
    codebook: codec.Codebook,
    num_tokens: int,
    slots: int,
    dim: int,
    kind: str,
) -> None:
    source = make_pages(num_tokens, slots=slots, dim=dim, kind=kind)
    books = [codebook] * len(source.planes)
    written = [encode(source, codebook, backend) for backend in BACKENDS.values()]
    assert written[0][0] == written[1][0]
    assert torch.equal(written[0][1], written[1][1])
    encoded, payload = written[0]
    for backend in BACKENDS.values():
        target = source.empty_like()
        decoded = codec.decode_pages(
            payload, target.planes, books, target.ids, num_tokens, backend=backend
        )
        assert torch.equal(target.content(), source.content())
        assert decoded == codec.Decoded(encoded.length, encoded.raw_bytes, encoded.checksum)
        for pages in (source, target):
            assert encoded.checksum == codec.checksum_pages(
                pages.planes, pages.ids, num_tokens, backend=backend
            )


@pytest.mark.parametrize("num_tokens", [1, 17, 48])
def test_slots_without_tokens_are_neither_sent_nor_written(
    codebook: codec.Codebook, backend: Backend, num_tokens: int
) -> None:
    source = make_pages(num_tokens)
    _, payload = encode(source, codebook, backend)
    for plane in source.planes:
        stale = bits(plane) == STALE
        plane.view(torch.int16)[stale] = 0x1234
    assert torch.equal(encode(source, codebook, backend)[1], payload)

    target = source.empty_like()
    codec.decode_pages(
        payload, target.planes, [codebook] * 2, target.ids, num_tokens, backend=backend
    )
    tokens = source.content()[0].numel()
    for plane in target.planes:
        assert int((bits(plane) != STALE).sum()) == tokens


@pytest.mark.parametrize("backend_name", sorted(BACKENDS))
def test_planes_may_be_strided_by_page_and_head(
    codebook: codec.Codebook, backend_name: str
) -> None:
    backend = BACKENDS[backend_name]
    pool = torch.randn(4, 2, 3, 16, 64).bfloat16()
    transposed = torch.randn(3, 4, 16, 64).bfloat16().transpose(0, 1)
    planes = [pool[:, 0], pool[:, 1], transposed]
    out = torch.empty(codec.max_segment_bytes(3, 3, 64, 40), dtype=torch.uint8)
    encoded = codec.encode_pages(planes, [codebook] * 3, [3, 0, 2], 40, out, backend=backend)
    copy = torch.zeros(4, 3, 3, 16, 64, dtype=torch.bfloat16)
    targets = [copy[:, 0], copy[:, 1], copy[:, 2].transpose(0, 1).contiguous().transpose(0, 1)]
    codec.decode_pages(
        out[: encoded.length], targets, [codebook] * 3, [0, 1, 2], 40, backend=backend
    )
    for plane, target in zip(planes, targets, strict=True):
        source = plane[[3, 0, 2]].transpose(0, 1).reshape(3, 48, 64)[:, :40]
        assert torch.equal(target[:3].transpose(0, 1).reshape(3, 48, 64)[:, :40], source)


def test_bytes_do_not_depend_on_where_the_pages_lie(
    codebook: codec.Codebook, backend: Backend
) -> None:
    source = make_pages(63, kind="mixed")
    _, payload = encode(source, codebook, backend)
    moved = source.empty_like()
    codec.decode_pages(payload, moved.planes, [codebook] * 2, moved.ids, 63)
    assert torch.equal(encode(moved, codebook, backend)[1], payload)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 63, 1000, 1023, 1024, 1025, 4099])
@pytest.mark.parametrize("coded", [True, False])
def test_flat_tensors_of_any_length(codebook: codec.Codebook, length: int, coded: bool) -> None:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(length)).bfloat16()
    payload = codec.encode(tensor, codebook if coded else None)
    assert payload.numel() <= codec.max_payload_bytes(length)
    decoded = codec.decode(payload, codebook if coded else None)
    assert decoded.shape == (length,)
    assert torch.equal(bits(decoded), bits(tensor))


def test_flat_decode_takes_a_shape_or_an_output(codebook: codec.Codebook) -> None:
    tensor = torch.randn(17, 3, 5).bfloat16()
    payload = codec.encode(tensor.transpose(0, 2), codebook)
    assert torch.equal(codec.decode(payload, codebook, shape=(5, 3, 17)), tensor.transpose(0, 2))
    out = torch.empty(5, 51, dtype=torch.bfloat16)
    assert codec.decode(payload, codebook, out=out) is out
    assert torch.equal(out.view(5, 3, 17), tensor.transpose(0, 2))


@pytest.mark.parametrize("escapes", [0, 1, 169, 170, 171, 1024])
def test_a_chunk_is_stored_in_full_once_its_escapes_would_be_larger(
    codebook: codec.Codebook, escapes: int
) -> None:
    """A chunk of 1,024 has 512 bytes for its tail: 170 escapes of 3 bytes, not 171."""
    patterns = torch.full((8192,), 120 << 7)
    patterns[1024 : 1024 + escapes] = 7 << 7
    tensor = from_bits(patterns)
    dense = codec.encode(from_bits(torch.full((8192,), 120 << 7)), codebook)
    payload = codec.encode(tensor, codebook)
    grown = payload.numel() - dense.numel()
    assert grown == -(-min(3 * escapes, 512) // 16) * 16
    assert torch.equal(bits(codec.decode(payload, codebook)), bits(tensor))


def test_expansion_is_bounded_and_normal_values_shrink(codebook: codec.Codebook) -> None:
    random = from_bits(torch.randint(-(2**15), 2**15, (100_000,)))
    assert codec.encode(random, codebook).numel() <= 200_000 * 1.0 + 112
    normal = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert 2 * normal.numel() / codec.encode(normal, codebook).numel() > 1.325


@given(
    patterns=st.lists(st.integers(0, 2**16 - 1), max_size=80),
    exponents=st.lists(st.integers(0, 255), min_size=16, max_size=16, unique=True),
    dim=st.integers(1, 9),
    slots=st.integers(1, 6),
    spread=st.integers(0, 7),
)
@settings(max_examples=150, deadline=None)
def test_any_values_any_codebook_any_geometry(
    patterns: list[int], exponents: list[int], dim: int, slots: int, spread: int
) -> None:
    """`spread` draws exponents towards the codebook, so that codes and escapes both occur."""
    codebook = codec.Codebook(tuple(exponents))
    near = [p if p % 8 < spread else (p & 0x807F) | exponents[p >> 7 & 0xF] << 7 for p in patterns]
    tokens = len(near) // dim
    num_pages = -(-tokens // slots)
    plane = torch.zeros(num_pages + 1, 1, slots, dim, dtype=torch.bfloat16)
    content = from_bits(torch.tensor(near[: tokens * dim], dtype=torch.int64))
    plane.view(-1)[: tokens * dim] = content
    ids = list(range(num_pages))
    written = []
    for backend in (reference, cpu):
        out = torch.empty(codec.max_segment_bytes(1, 1, dim, tokens), dtype=torch.uint8)
        encoded = codec.encode_pages([plane], [codebook], ids, tokens, out, backend=backend)
        written.append((encoded, out[: encoded.length].tolist()))
    assert written[0] == written[1]
    payload = torch.tensor(written[0][1], dtype=torch.uint8)
    for backend in (reference, cpu):
        target = torch.zeros_like(plane)
        codec.decode_pages(payload, [target], [codebook], [*reversed(ids)], tokens, backend=backend)
        flat = target[[*reversed(ids)]].reshape(-1)[: tokens * dim]
        assert torch.equal(bits(flat), bits(content))
