"""Calibration, ids and the artifact of a model."""

import json
from pathlib import Path

import pytest
import torch

import codec
from tests.codec.samples import from_bits


def with_counts(counts: dict[int, int]) -> torch.Tensor:
    exponents = [exponent for exponent, count in counts.items() for _ in range(count)]
    return from_bits(torch.tensor(exponents) << 7 | 0x55)


def test_the_sixteen_most_frequent_are_taken_and_ties_go_to_the_smaller() -> None:
    counts = dict.fromkeys(range(100, 110), 9) | dict.fromkeys(range(200, 220), 3) | {7: 1}
    book = codec.calibrate(with_counts(counts))
    assert book.exponents == (*range(100, 110), *range(200, 206))


def test_codes_that_are_left_go_to_zero_and_to_the_neighbours() -> None:
    book = codec.calibrate(with_counts({120: 5, 121: 2}))
    assert book.exponents == (0, *range(113, 128))


def test_several_tensors_shapes_and_dtypes_make_one_sample() -> None:
    sample = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    whole = codec.calibrate(sample.bfloat16())
    assert codec.calibrate([sample[:10], sample[10:].double()]) == whole
    assert codec.calibrate(sample.t()).id == whole.id


def test_a_sample_without_values_calibrates_nothing() -> None:
    with pytest.raises(codec.InvalidCodebook):
        codec.calibrate(torch.empty(0))
    with pytest.raises(codec.InvalidCodebook):
        codec.calibrate([])
    with pytest.raises(codec.UnsupportedDtype):
        codec.calibrate(torch.ones(4, dtype=torch.int32))
    with pytest.raises(codec.UnsupportedDtype):
        codec.calibrate(torch.ones(4), dtype=torch.float16)


@pytest.mark.parametrize(
    "exponents",
    [range(15), range(17), [0, *range(15)], [*range(15), 256], [-1, *range(15)], range(15, -1, -1)],
)
def test_a_codebook_has_sixteen_ascending_exponents(exponents: range | list[int]) -> None:
    with pytest.raises(codec.InvalidCodebook):
        codec.Codebook(tuple(exponents))


@pytest.mark.parametrize("slot_bytes", [0, 4, 12, 64, -8])
def test_slots_have_one_of_three_sizes(slot_bytes: int) -> None:
    with pytest.raises(codec.InvalidCodebook):
        codec.Codebook(tuple(range(16)), slot_bytes=slot_bytes)
    with pytest.raises(codec.InvalidCodebook):
        codec.calibrate(torch.ones(4), slot_bytes=slot_bytes)


def test_the_id_is_the_content() -> None:
    book = codec.Codebook(tuple(range(114, 130)))
    assert book.id == "58cfb478c2bd59fa", "ids are on the wire: they never change"
    assert book.id == codec.Codebook(tuple(range(114, 130))).id
    assert book.id != codec.Codebook(tuple(range(113, 129))).id
    assert book.id != codec.Codebook(tuple(range(114, 130)), slot_bytes=16).id


def sample(escapes: int, chunks: int = 8) -> torch.Tensor:
    """Chunks of sixteen exponents and so many others, each of those once."""
    chunk = torch.arange(1024) % 16 + 100
    chunk[:escapes] = torch.arange(escapes) % 64
    return from_bits(chunk << 7).repeat(chunks)


@pytest.mark.parametrize(
    ("escapes", "slot_bytes"),
    # Bytes of a chunk with slots of 8, 16, 32: 8 16 32, 8 16 32, 24 16 32, 24 16 32, 32 40 32,
    # 40 48 32, 40 48 64, 520 528 544, 520 520 520.
    [(0, 8), (2, 8), (3, 16), (5, 16), (6, 8), (10, 32), (11, 8), (170, 8), (600, 8)],
)
def test_the_slot_size_is_the_one_that_takes_the_fewest_bytes(
    escapes: int, slot_bytes: int
) -> None:
    values = sample(escapes)
    assert codec.calibrate(values).slot_bytes == slot_bytes
    sizes: dict[int, int] = {}
    for size in (8, 16, 32):
        book = codec.calibrate(values, slot_bytes=size)
        assert book.slot_bytes == size
        sizes[size] = codec.encode(values, book).numel()
    assert sizes[slot_bytes] == min(sizes.values())


def test_a_short_sample_counts_as_its_one_chunk() -> None:
    assert codec.calibrate(sample(10)[:500]).slot_bytes == 32
    assert codec.calibrate([sample(3)[:64], sample(3)[:64]]).slot_bytes == 16


def test_a_model_has_one_slot_size() -> None:
    few, many = sample(0, chunks=1), sample(10)
    assert codec.calibrate(few).slot_bytes == 8
    books = codec.Codebooks.calibrate({(0, "k"): few, (0, "v"): [many, few]})
    assert [book.slot_bytes for _, _, book in books] == [32, 32]
    assert books[0, "k"].exponents == codec.calibrate(few).exponents
    with pytest.raises(codec.InvalidCodebook):
        codec.Codebooks.of({(0, "k"): codec.calibrate(few), (0, "v"): codec.calibrate(many)})


def model() -> codec.Codebooks:
    scales = {(layer, plane): 2.0**layer for layer in (10, 0, 2) for plane in ("v", "k")}
    return codec.Codebooks.calibrate(
        {key: torch.linspace(-scale, scale, 999) for key, scale in scales.items()}
    )


def test_codebooks_are_found_by_layer_and_plane() -> None:
    books = model()
    assert [(layer, plane) for layer, plane, _ in books] == [
        (0, "k"), (0, "v"), (2, "k"), (2, "v"), (10, "k"), (10, "v"),
    ]  # fmt: skip
    assert books[2, "v"] == codec.calibrate(torch.linspace(-4, 4, 999))
    with pytest.raises(codec.CodebookMissing):
        books[1, "k"]
    with pytest.raises(codec.InvalidCodebook):
        codec.Codebooks(())


def test_the_artifact_survives_a_file_and_damage_shows(tmp_path: Path) -> None:
    books, path = model(), tmp_path / "codebooks.json"
    books.save(path)
    assert codec.Codebooks.load(path) == books
    assert codec.Codebooks.load(path).id == books.id
    text = path.read_text()
    artifact = json.loads(text)
    artifact["codebooks"][0]["layer"] = -1
    damaged = [
        "", "[]", "{}", text[:-20], json.dumps(artifact),
        text.replace('"version": 2', '"version": 1'), text.replace("bf16", "fp4"),
        text.replace('"slot_bytes": 8', '"slot_bytes": 9'), text.replace("slot_bytes", "bytes"),
    ]  # fmt: skip
    for content in damaged:
        path.write_text(content)
        with pytest.raises(codec.InvalidCodebook):
            codec.Codebooks.load(path)
