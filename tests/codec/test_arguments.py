"""Invalid arguments of the public calls raise typed errors."""

import pytest
import torch

import codec
from codec.backend import Backend
from codec.errors import CodecError
from tests.codec.payloads import encoded, layout_of
from tests.codec.samples import Pages


def test_small_output_is_rejected_before_it_is_written(
    source: Pages, codebook: codec.Codebook, backend: Backend
) -> None:
    layout = layout_of(encoded(source, [codebook] * 2))
    out = torch.full((layout.bound - 1,), 0xA5, dtype=torch.uint8)
    with pytest.raises(codec.BufferTooSmall):
        codec.encode_pages(source.planes, [codebook] * 2, source.ids, 17, out, backend=backend)
    assert bool((out == 0xA5).all())


def test_invalid_arguments_raise_typed_errors(source: Pages, codebook: codec.Codebook) -> None:
    out = torch.empty(source.bound, dtype=torch.uint8)
    books: list[codec.Codebook | None] = [codebook] * 2

    def call(**changed: object) -> None:
        arguments: dict[str, object] = {
            "planes": source.planes,
            "codebooks": books,
            "page_ids": source.ids,
            "num_tokens": 17,
            "out": out,
        }
        codec.encode_pages(**(arguments | changed))  # type: ignore[arg-type]

    first = source.planes[0]
    wrong: list[tuple[type[CodecError], dict[str, object]]] = [
        (codec.InvalidPlanes, {"planes": []}),
        (codec.InvalidPlanes, {"codebooks": books[:1]}),
        (codec.InvalidPlanes, {"planes": [first, first[:2]]}),
        (codec.InvalidPlanes, {"planes": [first[0], first[0]]}),
        (codec.InvalidPlanes, {"planes": [first[..., ::2], first[..., ::2]]}),
        (codec.InvalidPlanes, {"planes": [first.transpose(1, 2)] * 2}),
        (codec.InvalidPlanes, {"planes": [first, first.float()]}),
        (codec.InvalidCodebook, {"planes": [first.half()] * 2}),
        (codec.UnsupportedDtype, {"planes": [first.float()] * 2}),
        (codec.InvalidPages, {"page_ids": source.ids[:1]}),
        (codec.InvalidPages, {"page_ids": [0, 0]}),
        (codec.InvalidPages, {"page_ids": [0, len(first)]}),
        (codec.InvalidPages, {"page_ids": [-1, 0]}),
        (codec.InvalidPages, {"num_tokens": -1}),
        (codec.InvalidPages, {"num_tokens": 33}),
        (codec.InvalidBuffer, {"out": out.to(torch.int16)}),
        (codec.InvalidBuffer, {"out": out[::2]}),
    ]
    for error, changed in wrong:
        with pytest.raises(error):
            call(**changed)
