"""Calibration, codebook ids and the artifact of a model."""

import json
from pathlib import Path

import pytest
import torch

import codec
from codec import Mode
from codec.calibrate import Histogram
from codec.elements import BF16, BY_NAME, E4M3, E5M2, FLOAT_TYPES, FP16, INTEGER_TYPES, ElementType
from tests.codec.samples import BOOKS, from_bits, modes_of


def with_counts(counts: dict[int, int], element: ElementType = BF16) -> torch.Tensor:
    exponents = [exponent for exponent, count in counts.items() for _ in range(count)]
    return from_bits(torch.tensor(exponents) << element.mantissa_bits | 1, element.dtype)


def histogram(counts: dict[int, int], element: ElementType = BF16) -> Histogram:
    return Histogram.of(with_counts(counts, element), element.dtype)


def test_calibration_selects_most_frequent_exponents_and_smaller_on_ties() -> None:
    counts = dict.fromkeys(range(100, 110), 9) | dict.fromkeys(range(200, 220), 3) | {7: 1}
    sample = with_counts(counts)
    book = codec.calibrate(sample, mode=Mode.TOP16)
    assert book.exponents == (*range(100, 110), *range(200, 206))
    book = codec.calibrate(sample, mode=Mode.INBAND)
    assert book.exponents == (*range(100, 110), *range(200, 205))
    assert book.second == tuple(range(205, 220))
    book = codec.calibrate(sample, mode=Mode.THREE_BIT)
    assert book.exponents == tuple(range(100, 107))
    assert book.second == (107, 108, 109, *range(200, 212))


def test_unused_codes_go_to_zero_and_neighbouring_exponents() -> None:
    sample = with_counts({120: 5, 121: 2})
    assert codec.calibrate(sample, mode=Mode.TOP16).exponents == tuple(range(112, 128))
    book = codec.calibrate(sample, mode=Mode.INBAND)
    assert book.exponents == tuple(range(113, 128))
    assert book.second == (0, *range(106, 113), *range(128, 135))


@pytest.mark.parametrize(("outside", "is_window"), [(2, True), (200, False)])
def test_calibration_prefers_a_window_unless_it_is_much_larger(
    outside: int, is_window: bool
) -> None:
    """The window has 2 or 200 escapes; the most frequent exponents have one.

    The window therefore needs 0.002 or 0.4 bits per element more.
    """
    counts = dict.fromkeys(range(100, 115), 1000) | {115: 1, 200: outside}
    book = codec.calibrate(with_counts(counts), mode=Mode.TOP16)
    assert book.is_window == is_window
    assert book.exponents == (*range(100, 115), 115 if is_window else 200)


@pytest.mark.parametrize(
    ("counts", "mode"),
    [
        # Bits per element in top16, in-band and three-bit mode, for each of the three cases:
        # (12, 12.25, 13.25), (12, 12, 11), (12.19, 12.03, 13.2).
        (dict.fromkeys(range(100, 116), 10), Mode.TOP16),
        (dict.fromkeys(range(100, 107), 10), Mode.THREE_BIT),
        (dict.fromkeys(range(100, 115), 100) | dict.fromkeys(range(115, 125), 1), Mode.INBAND),
    ],
)
def test_calibration_selects_the_mode_with_the_fewest_bits(
    counts: dict[int, int], mode: Mode
) -> None:
    assert codec.calibrate(with_counts(counts)).mode is mode


def test_histogram_bits_sum_codes_remainders_and_escapes() -> None:
    """Four of 100 elements have an exponent far from 120."""
    counts = histogram({120: 90, 121: 6, 130: 4})
    three, fifteen, sixteen = (tuple(range(114, 114 + n)) for n in (7, 15, 16))
    assert counts.bits(codec.Codebook(sixteen)) == pytest.approx(4 + 8 + 32 * 4 / 100)
    inband = codec.Codebook(fifteen, Mode.INBAND, (130,))
    assert counts.bits(inband) == pytest.approx(4 + 8 + 4 * 4 / 100)
    listing = codec.Codebook(fifteen, Mode.INBAND)
    assert counts.bits(listing) == pytest.approx(4 + 8 + (4 + 32) * 4 / 100)
    three_bit = codec.Codebook(three, Mode.THREE_BIT, (121, 130))
    assert counts.bits(three_bit) == pytest.approx(3 + 8 + 4 * 10 / 100)


def test_histogram_bits_include_the_remainder_of_each_type() -> None:
    for element, rest in ((BF16, 8), (FP16, 11), (E5M2, 3), (E4M3, 4)):
        counts = histogram({3: 1, 4: 1}, element)
        book = counts.codebook(Mode.THREE_BIT)
        assert counts.bits(book) == 3 + rest
        assert counts.entropy_bits() == 1 + rest


def test_entropy_bits_sum_exponent_entropy_and_remainder() -> None:
    """Exponent probabilities 1/2, 1/4, 1/8 and 1/8 give an entropy of 1/2 + 2/4 + 3/8 + 3/8."""
    assert histogram({1: 4, 7: 2, 3: 1, 9: 1}).entropy_bits() == pytest.approx(1.75 + 8)
    assert histogram({5: 3}, E4M3).entropy_bits() == 4


@pytest.mark.parametrize("name", BOOKS)
def test_histogram_bits_equal_payload_size(name: str) -> None:
    """Each of ten chunks has eight escapes, so that second-level codes fill whole words."""
    book = BOOKS[name]
    third = next(e for e in range(book.element.exponents) if e not in book.exponents + book.second)
    exponents = torch.full((10, 1024), book.exponents[2])
    exponents[:, ::128] = third
    exponents[:, 0] = book.second[0] if book.second else third
    sample = from_bits(exponents << book.element.mantissa_bits, book.dtype).flatten()
    payload = codec.encode(sample, book)
    blocks = codec.read_header(payload).layout.blocks[0]
    expected = Histogram.of(sample, book.dtype).bits(book) * 10240 / 8
    assert 0 <= len(payload) - blocks.streams[0] - expected < 16


def test_sample_may_be_several_tensors_of_any_shape_and_dtype() -> None:
    sample = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        whole = codec.calibrate(sample.to(dtype), dtype)
        assert whole.dtype == dtype
        assert codec.calibrate([sample[:10], sample[10:].double()], dtype) == whole
        assert codec.calibrate(sample.t(), dtype).id == whole.id


def test_calibration_rejects_empty_samples_and_unsupported_modes() -> None:
    ones, nothing = torch.ones(4), torch.empty(0)
    for sample in (nothing, [nothing], list[torch.Tensor]()):
        with pytest.raises(codec.InvalidCodebook):
            codec.calibrate(sample)
    with pytest.raises(codec.UnsupportedDtype):
        codec.calibrate(ones.int())
    with pytest.raises(codec.UnsupportedDtype):
        codec.calibrate(ones, torch.float32)
    with pytest.raises(codec.InvalidCodebook):
        codec.calibrate(ones, mode=Mode.RAW)
    for mode in (Mode.TOP16, Mode.INBAND):
        with pytest.raises(codec.InvalidCodebook):
            codec.calibrate(ones, torch.float8_e4m3fn, mode)


@pytest.mark.parametrize("name", [element.name for element in FLOAT_TYPES])
def test_calibration_supports_each_type_and_mode(name: str) -> None:
    element = BY_NAME[name]
    sample = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for mode in modes_of(element):
        book = codec.calibrate(sample, element.dtype, mode)
        assert (book.mode, book.dtype, len(book.exponents)) == (mode, element.dtype, mode.codes)
        rounded = sample.to(element.dtype)
        decoded = codec.decode(codec.encode(rounded, book), book, rounded.shape)
        assert torch.equal(decoded.float(), rounded.float())


@pytest.mark.parametrize(
    "exponents",
    [range(15), range(17), [0, *range(15)], [*range(15), 256], [-1, *range(15)], range(15, -1, -1)],
)
def test_codebook_rejects_exponents_that_do_not_ascend(exponents: range | list[int]) -> None:
    with pytest.raises(codec.InvalidCodebook):
        codec.Codebook(tuple(exponents))


@pytest.mark.parametrize(
    ("exponents", "mode", "second", "dtype"),
    [
        (16, Mode.INBAND, (), torch.bfloat16),
        (8, Mode.THREE_BIT, (), torch.bfloat16),
        (0, Mode.RAW, (), torch.bfloat16),
        (16, Mode.TOP16, (20,), torch.bfloat16),
        (15, Mode.INBAND, range(20, 36), torch.bfloat16),
        (15, Mode.INBAND, (14,), torch.bfloat16),
        (15, Mode.INBAND, (30, 20), torch.bfloat16),
        (15, Mode.INBAND, (20, 256), torch.bfloat16),
        (15, Mode.INBAND, (20, 32), torch.float16),
        (7, Mode.THREE_BIT, (16,), torch.float8_e4m3fn),
        (16, Mode.TOP16, (), torch.float8_e4m3fn),
        (15, Mode.INBAND, (), torch.float8_e4m3fn),
    ],
)
def test_codebook_rejects_exponents_that_do_not_fit_mode_or_type(
    exponents: int, mode: Mode, second: range | tuple[int, ...], dtype: torch.dtype
) -> None:
    with pytest.raises(codec.InvalidCodebook):
        codec.Codebook(tuple(range(exponents)), mode, tuple(second), dtype)


@pytest.mark.parametrize("element", INTEGER_TYPES, ids=lambda element: element.name)
def test_integer_types_have_no_codebooks(element: ElementType) -> None:
    for mode in Mode:
        with pytest.raises(codec.InvalidCodebook):
            codec.Codebook(tuple(range(mode.codes)), mode, dtype=element.dtype)
    with pytest.raises(codec.UnsupportedDtype):
        codec.calibrate(torch.ones(4), element.dtype)
    with pytest.raises(codec.InvalidCodebook):
        codec.encode(torch.ones(4, dtype=element.dtype), BOOKS["bf16-top16-window"])


def test_codebook_rejects_unsupported_dtype() -> None:
    with pytest.raises(codec.UnsupportedDtype):
        codec.Codebook(tuple(range(16)), dtype=torch.float32)


def test_codebook_id_is_a_content_hash() -> None:
    codes = tuple(range(2, 17))
    books = [
        codec.Codebook(tuple(range(114, 130))),
        codec.Codebook(tuple(range(113, 129))),
        codec.Codebook(codes, Mode.INBAND),
        codec.Codebook(codes, Mode.INBAND, (20,)),
        codec.Codebook(codes, Mode.INBAND, (21,)),
        codec.Codebook(codes, Mode.INBAND, (21,), torch.float16),
        codec.Codebook(codes, Mode.INBAND, (21,), torch.float8_e5m2),
    ]
    assert books[0].id == "eac8dc0a287ff416", "ids are part of the wire format and must not change"
    assert books[0].id == codec.Codebook(tuple(range(114, 130))).id
    assert len({book.id for book in books}) == len(books)


def model() -> codec.Codebooks:
    scales = {(layer, plane): 2.0**layer for layer in (10, 0, 2) for plane in ("v", "k")}
    return codec.Codebooks.of(
        {key: codec.calibrate(torch.linspace(-scale, scale, 999)) for key, scale in scales.items()}
    )


def test_codebooks_are_indexed_by_layer_and_plane() -> None:
    books = model()
    assert [(layer, plane) for layer, plane, _ in books] == [
        (0, "k"), (0, "v"), (2, "k"), (2, "v"), (10, "k"), (10, "v"),
    ]  # fmt: skip
    assert books[2, "v"] == codec.calibrate(torch.linspace(-4, 4, 999))
    with pytest.raises(codec.CodebookMissing):
        books[1, "k"]
    with pytest.raises(codec.InvalidCodebook):
        codec.Codebooks(())


def test_codebooks_of_a_model_may_differ_in_mode_but_not_in_dtype() -> None:
    few, many = with_counts({100: 1}), with_counts(dict.fromkeys(range(100, 116), 1))
    v_book = codec.calibrate([many, many])
    books = codec.Codebooks.of({(0, "k"): codec.calibrate(few), (0, "v"): v_book})
    assert [book.mode for _, _, book in books] == [Mode.THREE_BIT, Mode.TOP16]
    fp16 = codec.calibrate(few, torch.float16, Mode.INBAND)
    assert fp16.mode is Mode.INBAND
    assert fp16.dtype == torch.float16
    with pytest.raises(codec.InvalidCodebook):
        codec.Codebooks.of({(0, "k"): fp16, (0, "v"): v_book})


def test_artifact_round_trips_and_damage_is_detected(tmp_path: Path) -> None:
    books = model()
    path = tmp_path / "codebooks.json"
    books.save(path)
    assert codec.Codebooks.load(path) == books
    assert codec.Codebooks.load(path).id == books.id
    text = path.read_text()
    artifact = json.loads(text)
    artifact["codebooks"][0]["layer"] = -1
    damaged = [
        "", "[]", "{}", text[:-20], json.dumps(artifact),
        text.replace('"version": 3', '"version": 2'), text.replace("bf16", "fp4"),
        text.replace("bf16", "fp16"), text.replace("three_bit", "two_bit"),
        text.replace("three_bit", "inband"), text.replace("second", "third"),
        text.replace('"three_bit"', "7"),
    ]  # fmt: skip
    for content in damaged:
        assert content != text
        path.write_text(content)
        with pytest.raises(codec.InvalidCodebook):
            codec.Codebooks.load(path)


@pytest.mark.parametrize("name", BOOKS)
def test_artifact_stores_every_mode_and_type(tmp_path: Path, name: str) -> None:
    books = codec.Codebooks.of({(0, "k"): BOOKS[name]})
    books.save(tmp_path / "codebooks.json")
    assert codec.Codebooks.load(tmp_path / "codebooks.json") == books
