"""What goes in comes out, bit for bit, and every backend writes the same bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import codec
from codec import cpu, reference
from codec.format import FULL, LISTED, SLOT_SIZES, slot_capacity
from codec.ops import Backend
from tests.codec.samples import BACKENDS, STALE, Pages, bits, from_bits, make_pages

TOKENS = [1, 15, 16, 17, 100]
GEOMETRIES = [(16, 64), (16, 80), (16, 128), (16, 20), (4, 3), (4, 20), (1, 128), (5, 7), (1, 1)]
SCATTERED = (0, 7, *range(110, 123), 255)


def encode(
    pages: Pages,
    codebook: codec.Codebook | None,
    backend: Backend | None = None,
) -> tuple[codec.Encoded, torch.Tensor]:
    """The segment of all planes, from a buffer that starts at an odd address and has an end."""
    bound = pages.bound_with(codebook.slot_bytes if codebook else 8)
    buffer = torch.full((bound + 1 + 64,), 0xA5, dtype=torch.uint8)
    encoded = codec.encode_pages(
        pages.planes,
        [codebook] * len(pages.planes),
        pages.ids,
        pages.num_tokens,
        buffer[1 : 1 + bound],
        backend=backend,
    )
    assert bool((buffer[1 + encoded.length :] == 0xA5).all())
    return encoded, buffer[1 : 1 + encoded.length].clone()


@pytest.mark.parametrize("slot_bytes", SLOT_SIZES)
@pytest.mark.parametrize("book", [range(114, 130), range(16), range(240, 256), SCATTERED, None])
def test_every_pattern_survives(
    book: range | tuple[int, ...] | None, slot_bytes: int, backend: Backend
) -> None:
    codebook = None if book is None else codec.Codebook(tuple(book), slot_bytes=slot_bytes)
    every = from_bits(torch.arange(-(2**15), 2**15))
    for order in (torch.arange(2**16), torch.randperm(2**16)):
        source = Pages([every[order].view(4, 1, 16, 1024)], [2, 0, 3, 1], 64, torch.Generator())
        _, payload = encode(source, codebook, backend)
        target = source.empty_like()
        codec.decode_pages(payload, target.planes, [codebook], target.ids, 64, backend=backend)
        assert torch.equal(target.content(), source.content())


@pytest.mark.parametrize("slot_bytes", SLOT_SIZES)
@pytest.mark.parametrize("kind", ["normal", "random", "mixed", 0.004, 0.05, 0.3])
@pytest.mark.parametrize(("slots", "dim"), GEOMETRIES)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_pages_round_trip_through_each_backend(
    num_tokens: int, slots: int, dim: int, kind: str | float, slot_bytes: int
) -> None:
    agree(make_pages(num_tokens, slots=slots, dim=dim, kind=kind), slot_bytes)


@pytest.mark.parametrize("kind", ["random", 0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize(("slots", "dim"), [(16, 20), (16, 128), (4, 3), (1000, 64)])
def test_a_thousand_tokens(slots: int, dim: int, kind: str | float) -> None:
    agree(make_pages(1000, kv_heads=2, slots=slots, dim=dim, kind=kind), 16)


def agree(source: Pages, slot_bytes: int) -> None:
    """All backends write the same bytes and read each other's, for any kind of codebook."""
    num_tokens = source.num_tokens
    windowed = codec.Codebook(tuple(range(114, 130)), slot_bytes=slot_bytes)
    scattered = codec.Codebook(SCATTERED, slot_bytes=slot_bytes)
    for codebook in (windowed, scattered, None):
        agree_with(source, codebook, num_tokens)


def agree_with(source: Pages, codebook: codec.Codebook | None, num_tokens: int) -> None:
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
    contents = {
        codec.checksum_pages(pages.planes, pages.ids, num_tokens, backend=backend)
        for pages in (source, target)
        for backend in BACKENDS.values()
    }
    assert len(contents) == 1
    assert codebook or contents == {encoded.checksum}


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
    out = torch.empty(codec.max_segment_bytes(3, 3, 64, 40, 16), dtype=torch.uint8)
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


def one_chunk(length: int, escapes: int) -> torch.Tensor:
    """A flat tensor whose last elements have an exponent outside the codebook."""
    patterns = torch.full((length,), 120 << 7 | 0x8011)
    patterns[length - escapes :] = 7 << 7
    return from_bits(patterns)


@pytest.mark.parametrize("slot_bytes", SLOT_SIZES)
@pytest.mark.parametrize("length", [1024, 1023, 40, 25, 24, 5])
def test_escapes_move_from_the_slot_to_a_list_to_the_chunk_in_full(
    slot_bytes: int, length: int, backend: Backend
) -> None:
    """At most (slot - 1) / 3 lie in the slot; a list takes at most two bytes a word."""
    book = codec.Codebook(tuple(range(114, 130)), slot_bytes=slot_bytes)
    words, capacity = -(-length // 4), slot_capacity(slot_bytes)
    edges = {0, capacity, capacity + 1, 2 * words // 3, 2 * words // 3 + 1, length}
    for escapes in sorted(edges & set(range(length + 1))):
        plane = one_chunk(length, escapes).view(1, 1, length, 1)
        source = Pages([plane], [0], length, torch.Generator())
        encoded, payload = encode(source, book, backend)
        layout = codec.read_header(payload).layout
        assert encoded.escapes == escapes
        if escapes <= capacity:
            kind, spilled = escapes, 0
        elif 3 * escapes <= 2 * words:
            kind, spilled = LISTED, 3 * escapes
        else:
            kind, spilled = FULL, 2 * max(0, words - (slot_bytes - 8) // 2)
        assert int(payload[layout.blocks[0]]) == kind
        assert encoded.length == layout.length(-(-spilled // 8))
        target = source.empty_like()
        codec.decode_pages(payload, target.planes, [book], [0], length, backend=backend)
        assert torch.equal(target.content(), source.content())


@pytest.mark.parametrize("slot_bytes", SLOT_SIZES)
def test_the_bound_is_what_the_worst_chunk_takes(slot_bytes: int) -> None:
    book = codec.Codebook(tuple(range(114, 130)), slot_bytes=slot_bytes)
    for length in [*range(1, 50), 1024]:
        sizes = [len(codec.encode(one_chunk(length, n), book)) for n in range(min(length, 180) + 1)]
        full = len(codec.encode(one_chunk(length, length), book))
        header = codec.read_header(codec.encode(one_chunk(length, 0), book))
        assert max(*sizes, full) == header.layout.bound, length
        assert header.layout.bound <= codec.max_payload_bytes(length, slot_bytes)
        assert codec.max_payload_bytes(length, slot_bytes) <= codec.max_payload_bytes(length)


@pytest.mark.parametrize("slot_bytes", SLOT_SIZES)
def test_expansion_is_small_and_normal_values_shrink(slot_bytes: int) -> None:
    book = codec.Codebook(tuple(range(114, 130)), slot_bytes=slot_bytes)
    random = from_bits(torch.randint(-(2**15), 2**15, (1 << 20,)))
    assert codec.encode(random, book).numel() <= 1.005 * (2 << 20)
    normal = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1)).bfloat16()
    ratio = {8: 1.32, 16: 1.315, 32: 1.30}[slot_bytes]
    assert 2 * normal.numel() / codec.encode(normal, book).numel() > ratio


def test_codebooks_of_one_call_have_one_slot_size(codebook: codec.Codebook) -> None:
    source = make_pages(17)
    other = codec.Codebook(codebook.exponents, slot_bytes=16)
    out = torch.full((source.bound,), 0xA5, dtype=torch.uint8)
    with pytest.raises(codec.InvalidCodebook):
        codec.encode_pages(source.planes, [codebook, other], source.ids, 17, out)
    assert bool((out == 0xA5).all())
    _, payload = encode(source, codebook)
    with pytest.raises(codec.InvalidCodebook):
        codec.decode_pages(payload, source.planes, [codebook, other], source.ids, 17)


@given(
    patterns=st.lists(st.integers(0, 2**16 - 1), max_size=80),
    exponents=st.lists(st.integers(0, 255), min_size=16, max_size=16, unique=True),
    dim=st.integers(1, 9),
    slots=st.integers(1, 6),
    spread=st.integers(0, 7),
    slot_bytes=st.sampled_from(SLOT_SIZES),
)
@settings(max_examples=150, deadline=None)
def test_any_values_any_codebook_any_geometry(
    patterns: list[int], exponents: list[int], dim: int, slots: int, spread: int, slot_bytes: int
) -> None:
    """`spread` draws exponents towards the codebook, so that codes and escapes both occur."""
    codebook = codec.Codebook(tuple(sorted(exponents)), slot_bytes=slot_bytes)
    near = [p if p % 8 < spread else (p & 0x807F) | exponents[p >> 7 & 0xF] << 7 for p in patterns]
    tokens = len(near) // dim
    num_pages = -(-tokens // slots)
    plane = torch.zeros(num_pages + 1, 1, slots, dim, dtype=torch.bfloat16)
    content = from_bits(torch.tensor(near[: tokens * dim], dtype=torch.int64))
    plane.view(-1)[: tokens * dim] = content
    ids = list(range(num_pages))
    written = []
    for backend in (reference, cpu):
        out = torch.empty(codec.max_segment_bytes(1, 1, dim, tokens, slots), dtype=torch.uint8)
        encoded = codec.encode_pages([plane], [codebook], ids, tokens, out, backend=backend)
        written.append((encoded, out[: encoded.length].tolist()))
    assert written[0] == written[1]
    payload = torch.tensor(written[0][1], dtype=torch.uint8)
    for backend in (reference, cpu):
        target = torch.zeros_like(plane)
        codec.decode_pages(payload, [target], [codebook], [*reversed(ids)], tokens, backend=backend)
        flat = target[[*reversed(ids)]].reshape(-1)[: tokens * dim]
        assert torch.equal(bits(flat), bits(content))
