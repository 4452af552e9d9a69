"""Pages round-trip bit for bit, and every backend writes the same bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import codec
from codec import checks
from codec.backend import Backend
from codec.elements import FLOAT_TYPES, INTEGER_TYPES, ElementType, element_of
from codec.format import Mode, overflow_words
from tests.codec.samples import (
    BACKENDS,
    BOOK,
    BOOKS,
    EVERY,
    STALE,
    Pages,
    bits,
    dtype_of,
    from_bits,
    make_pages,
    modes_of,
    random_patterns,
)

pytestmark = pytest.mark.slow

SHAPES = [
    # tokens, slots, dim
    (1, 1, 1), (15, 16, 64), (16, 16, 80), (17, 16, 128), (100, 16, 20), (31, 4, 3), (63, 5, 7),
    (3, 1, 128), (17, 16, 63),
]  # fmt: skip


def encode(
    pages: Pages,
    codebook: codec.Codebook | None,
    backend: Backend | None = None,
) -> tuple[codec.Encoded, torch.Tensor]:
    """Encode all planes into a buffer at an odd address, with space after the segment."""
    buffer = torch.full((pages.bound + 1 + 64,), 0xA5, dtype=torch.uint8)
    encoded = codec.encode_pages(
        pages.planes,
        [codebook] * len(pages.planes),
        pages.ids,
        pages.num_tokens,
        buffer[1 : 1 + pages.bound],
        backend=backend,
    )
    assert bool((buffer[1 + encoded.length :] == 0xA5).all())
    return encoded, buffer[1 : 1 + encoded.length].clone()


@pytest.mark.few(20)
@pytest.mark.parametrize("name", EVERY)
def test_every_bit_pattern_round_trips(name: str, backend: Backend) -> None:
    """The patterns are in order, in random order, or each surrounded by elements with codes."""
    codebook = EVERY[name]
    dtype = dtype_of(name)
    wide = dtype.itemsize > 2  # too many patterns: use a random sample
    every = random_patterns((1 << 16,), dtype) if wide else torch.arange(1 << 8 * dtype.itemsize)
    shuffled = every[torch.randperm(len(every))]
    coded = codebook.exponents[3] << codebook.element.mantissa_bits if codebook else 0
    some = every[:: 29 if len(every) > 256 else 1]
    among_coded = torch.full((64 * len(some),), coded)
    among_coded[::64] = some
    for patterns in (every, shuffled, among_coded):
        dim = len(patterns) // 64
        plane = from_bits(patterns[: 64 * dim], dtype).view(4, 1, 16, dim)
        source = Pages([plane], [2, 0, 3, 1], 64, torch.Generator())
        _, payload = encode(source, codebook, backend)
        target = source.empty_like()
        codec.decode_pages(payload, target.planes, [codebook], target.ids, 64, backend=backend)
        assert torch.equal(target.content(), source.content())


@pytest.mark.few(25)
@pytest.mark.parametrize("kind", ["normal", "mixed", 0.004, 0.05, 0.3])
@pytest.mark.parametrize("name", BOOKS)
def test_pages_round_trip_in_each_backend(name: str, kind: str | float) -> None:
    for tokens, slots, dim in SHAPES:
        source = make_pages(tokens, slots=slots, dim=dim, kind=kind, book=BOOKS[name])
        agree(source, BOOKS[name])


@pytest.mark.parametrize("name", [name for name, book in EVERY.items() if not book])
def test_raw_pages_round_trip_in_each_backend(name: str) -> None:
    for tokens, slots, dim in SHAPES:
        agree(make_pages(tokens, slots=slots, dim=dim, kind="random", dtype=dtype_of(name)), None)


@pytest.mark.parametrize("name", EVERY)
def test_segment_without_tokens_is_only_a_header(name: str) -> None:
    source = make_pages(0, dtype=dtype_of(name))
    agree(source, EVERY[name])
    assert encode(source, EVERY[name])[0] == codec.Encoded(64 + 2 * 16, 0, 0, 0)


@pytest.mark.few(10)
@pytest.mark.parametrize("kind", ["random", 0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("name", [name for name in BOOKS if name.endswith("window")])
def test_thousand_tokens_round_trip(name: str, kind: str | float) -> None:
    for slots, dim in [(16, 20), (1000, 64)]:
        source = make_pages(1000, kv_heads=2, slots=slots, dim=dim, kind=kind, book=BOOKS[name])
        agree(source, BOOKS[name])


@pytest.mark.parametrize("element", INTEGER_TYPES, ids=lambda element: element.name)
def test_integer_planes_of_one_column_may_have_any_last_stride(
    element: ElementType, backend: Backend
) -> None:
    pool = from_bits(random_patterns((4, 2, 16, 3), element.dtype), element.dtype)
    plane = pool[..., 1].contiguous().as_strided((4, 2, 16, 1), (32, 16, 1, 7))
    out = torch.empty(codec.max_segment_bytes(1, 2, 1, 20, 16, element), dtype=torch.uint8)
    encoded = codec.encode_pages([plane], [None], [2, 0], 20, out, backend=backend)
    target = torch.zeros_like(plane)
    codec.decode_pages(out[: encoded.length], [target], [None], [1, 3], 20, backend=backend)
    assert torch.equal(target[1], plane[2])
    assert torch.equal(target[3, :, :4], plane[0, :, :4])
    assert not target[3, :, 4:].any()


def agree(source: Pages, codebook: codec.Codebook | None) -> None:
    """Check that all backends write the same bytes, and that each decodes them."""
    books, num_tokens = [codebook] * len(source.planes), source.num_tokens
    (encoded, payload), *others = [
        encode(source, codebook, backend) for backend in BACKENDS.values()
    ]
    for other in others:
        assert other[0] == encoded
        assert torch.equal(other[1], payload)
    contents = set()
    for backend in BACKENDS.values():
        target = source.empty_like()
        codec.decode_pages(payload, target.planes, books, target.ids, num_tokens, backend=backend)
        assert torch.equal(target.content(), source.content())
        for pages in (source, target):
            contents.add(codec.checksum_pages(pages.planes, pages.ids, num_tokens, backend=backend))
    assert len(contents) == 1
    assert codebook or contents == {encoded.checksum}


def test_planes_of_a_segment_may_have_different_modes(backend: Backend) -> None:
    books = [BOOKS[f"bf16-{name}"] for name in ("three_bit-gaps", "top16-window", "inband-window")]
    mixed = [None, books[0], books[1], None, books[2], None]
    source = make_pages(63, num_planes=6, kind="mixed")
    written = []
    for one in BACKENDS.values():
        out = torch.empty(source.bound, dtype=torch.uint8)
        encoded = codec.encode_pages(source.planes, mixed, source.ids, 63, out, backend=one)
        written.append(out[: encoded.length].tolist())
    assert all(other == written[0] for other in written)
    target = source.empty_like()
    payload = torch.tensor(written[0], dtype=torch.uint8)
    codec.decode_pages(payload, target.planes, mixed, target.ids, 63, backend=backend)
    assert torch.equal(target.content(), source.content())
    assert [plane.mode for plane in codec.read_header(payload).planes] == [0, 3, 1, 0, 2, 0]


@pytest.mark.parametrize("num_tokens", [1, 17, 48])
@pytest.mark.parametrize("name", ["bf16-top16-window", "fp16-inband-gaps", "e4m3-three_bit-window"])
def test_slots_without_tokens_are_neither_read_nor_written(
    name: str, backend: Backend, num_tokens: int
) -> None:
    book = BOOKS[name]
    source = make_pages(num_tokens, book=book)
    stale = STALE[book.element.size]
    _, payload = encode(source, book, backend)
    for plane in source.planes:
        patterns = bits(plane)
        patterns[patterns == stale] = 0x34
    assert torch.equal(encode(source, book, backend)[1], payload)

    target = source.empty_like()
    codec.decode_pages(payload, target.planes, [book] * 2, target.ids, num_tokens, backend=backend)
    tokens = source.content()[0].numel()
    for plane in target.planes:
        assert int((bits(plane) != stale).sum()) == tokens


@pytest.mark.parametrize("name", ["bf16-top16-window", "e5m2-inband-window", "e4m3"])
def test_planes_may_be_strided_by_page_and_head(name: str, backend: Backend) -> None:
    codebook = EVERY[name]
    dtype = dtype_of(name)
    pool = torch.randn(4, 2, 3, 16, 64).to(dtype)
    transposed = torch.randn(3, 4, 16, 64).to(dtype).transpose(0, 1)
    planes = [pool[:, 0], pool[:, 1], transposed]
    bound = codec.max_segment_bytes(3, 3, 64, 40, 16, element_of(dtype))
    out = torch.empty(bound, dtype=torch.uint8)
    encoded = codec.encode_pages(planes, [codebook] * 3, [3, 0, 2], 40, out, backend=backend)
    copy = torch.zeros(4, 3, 3, 16, 64, dtype=dtype)
    targets = [copy[:, 0], copy[:, 1], copy[:, 2].transpose(0, 1).clone().transpose(0, 1)]
    codec.decode_pages(
        out[: encoded.length], targets, [codebook] * 3, [0, 1, 2], 40, backend=backend
    )
    for plane, target in zip(planes, targets, strict=True):
        source = bits(plane)[[3, 0, 2]].transpose(0, 1).reshape(3, 48, 64)[:, :40]
        assert torch.equal(bits(target)[:3].transpose(0, 1).reshape(3, 48, 64)[:, :40], source)


def test_bytes_do_not_depend_on_page_ids(codebook: codec.Codebook, backend: Backend) -> None:
    source = make_pages(63, kind="mixed")
    _, payload = encode(source, codebook, backend)
    moved = source.empty_like()
    codec.decode_pages(payload, moved.planes, [codebook] * 2, moved.ids, 63)
    assert torch.equal(encode(moved, codebook, backend)[1], payload)


def one_chunk(book: codec.Codebook, length: int, escapes: int, exponent: int) -> torch.Tensor:
    """Return a chunk of `length` elements whose last `escapes` elements have this exponent."""
    patterns = torch.full((length,), book.exponents[-2] << book.element.mantissa_bits | 1)
    patterns[length - escapes :] = exponent << book.element.mantissa_bits
    return from_bits(patterns, book.dtype)


def limit(book: codec.Codebook, length: int) -> int:
    """Return the number of entry words of an uncoded chunk of `length` elements."""
    return overflow_words(book.element, book.mode) * -(-length // 32)


@pytest.mark.few(40)
@pytest.mark.parametrize("length", [1024, 1023, 290, 40, 32, 5])
@pytest.mark.parametrize("name", BOOKS)
def test_chunk_is_stored_uncoded_when_entries_reach_the_limit(
    name: str, length: int, backend: Backend
) -> None:
    """`TOP16` stores a word per escape, other modes four bits plus a word if it is listed."""
    book = BOOKS[name]
    third = next(e for e in range(book.element.exponents) if e not in book.exponents + book.second)
    max_words = limit(book, length)
    for exponent in (third, *book.second[-1:]):
        edges = {
            0,
            1,
            8,
            9,
            57,
            max_words - 1,
            max_words,
            64,
            65,
            256,
            257,
            8 * max_words - 8,
            8 * max_words,
            length,
        }
        for escapes in sorted(edges & set(range(length + 1))):
            words = escapes if exponent == third else 0
            expected = words
            uncoded = words >= max_words
            if book.mode is not Mode.TOP16:
                expected += -(-escapes // 8)
                uncoded = expected >= max_words or escapes > 256 or words > 64
            plane = one_chunk(book, length, escapes, exponent).view(1, 1, length, 1)
            source = Pages([plane], [0], length, torch.Generator())
            encoded, payload = encode(source, book, backend)
            layout = codec.read_header(payload).layout
            assert encoded.escapes == escapes
            ends = payload[layout.starts : layout.starts + 8].view(2, 4).tolist()
            assert [int.from_bytes(end, "little") for end in ends] == [
                0,
                max_words if uncoded else expected,
            ]
            target = source.empty_like()
            codec.decode_pages(payload, target.planes, [book], [0], length, backend=backend)
            assert torch.equal(target.content(), source.content())


@pytest.mark.parametrize("name", BOOKS)
def test_bound_is_the_size_of_an_uncoded_chunk(name: str) -> None:
    book = BOOKS[name]
    third = next(e for e in range(book.element.exponents) if e not in book.exponents + book.second)
    for length in [*range(1, 70), 1024]:
        payload = codec.encode(one_chunk(book, length, length, third), book)
        bound = codec.read_header(payload).layout.bound
        assert bound == len(payload) or (len(payload) < bound and length < limit(book, length))
        assert bound <= codec.max_payload_bytes(length, book.element)


@pytest.mark.parametrize("name", EVERY)
def test_random_bits_expand_by_at_most_half_a_percent(name: str) -> None:
    codebook = EVERY[name]
    dtype = dtype_of(name)
    random = from_bits(random_patterns((1 << 19,), dtype), dtype)
    assert codec.encode(random, codebook).numel() <= 1.005 * random.nbytes


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("bf16-top16-window", 1.32), ("bf16-inband-window", 1.32), ("bf16-three_bit-window", 1.38)],
)
def test_normal_values_are_compressed(name: str, ratio: float) -> None:
    normal = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert normal.nbytes / codec.encode(normal, BOOKS[name]).numel() > ratio


@st.composite
def codebooks(draw: st.DrawFn) -> codec.Codebook:
    element = draw(st.sampled_from(FLOAT_TYPES))
    mode = draw(st.sampled_from(modes_of(element)))
    max_words = min(mode.codes + 15 * mode.has_escape_code, element.exponents)
    exponents = st.integers(0, element.exponents - 1)
    drawn = draw(st.lists(exponents, min_size=mode.codes, max_size=max_words, unique=True))
    codes, second = sorted(drawn[: mode.codes]), sorted(drawn[mode.codes :])
    return codec.Codebook(tuple(codes), mode, tuple(second), element.dtype)


@given(
    book=codebooks(),
    kind=st.sampled_from(["normal", "random", "mixed", 0.0, 0.01, 0.1, 0.5]),
    tokens=st.integers(0, 40),
    heads=st.integers(1, 3),
    slots=st.integers(1, 17),
    dim=st.integers(1, 70),
)
@settings(max_examples=150)
def test_random_codebooks_and_geometries_round_trip(
    book: codec.Codebook,
    kind: str | float,
    tokens: int,
    heads: int,
    slots: int,
    dim: int,
) -> None:
    """Pages are encoded in a random order and decoded into other pages."""
    pages = make_pages(tokens, kv_heads=heads, slots=slots, dim=dim, kind=kind, book=book)
    agree(pages, book)
    agree(pages, None)


def test_segment_with_too_many_entries_for_starts_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = make_pages(17)
    out = torch.empty(source.bound, dtype=torch.uint8)
    monkeypatch.setattr(checks, "MAX_ENTRY_WORDS", 100)
    with pytest.raises(codec.InvalidPlanes):
        codec.encode_pages(source.planes, [BOOK] * 2, source.ids, 17, out)
