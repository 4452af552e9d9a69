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


@pytest.mark.parametrize("exponents", [range(15), range(17), [*range(15), 0], [*range(15), 256]])
def test_a_codebook_has_sixteen_distinct_exponents(exponents: range | list[int]) -> None:
    with pytest.raises(codec.InvalidCodebook):
        codec.Codebook(tuple(exponents))


def test_the_id_is_the_content() -> None:
    book = codec.Codebook(tuple(range(114, 130)))
    assert book.id == "a3c2a2e09dc7835b", "ids are on the wire: they never change"
    assert book.id == codec.Codebook(tuple(range(114, 130))).id
    assert book.id != codec.Codebook(tuple(range(113, 129))).id
    assert book.id != codec.Codebook(tuple(reversed(range(114, 130)))).id


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
        text.replace('"version": 1', '"version": 2'), text.replace("bf16", "fp4"),
    ]  # fmt: skip
    for content in damaged:
        path.write_text(content)
        with pytest.raises(codec.InvalidCodebook):
            codec.Codebooks.load(path)
