"""The Triton backend against the reference, on `DEVICE`. `test_kernels.py` runs these.

Each check is a plain test function; with `TRITON_INTERPRET=1` they run on CPU tensors.
"""

import pytest
import torch

import codec
from codec import cuda, reference
from codec.ops import Backend
from tests.codec.samples import Pages, bits, make_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOOK = codec.Codebook(tuple(range(114, 130)))
CASES = [
    (1, 16, 64, "normal"),
    (17, 16, 64, "mixed"),
    (31, 16, 64, "random"),
    (17, 16, 80, "mixed"),
    (17, 16, 128, "normal"),
    (9, 4, 37, "mixed"),
    (3, 1, 1, "random"),
    (0, 16, 64, "normal"),
]


def on_device(pages: Pages) -> Pages:
    planes = [plane.to(DEVICE) for plane in pages.planes]
    return Pages(planes, pages.ids, pages.num_tokens, pages.generator)


def encode(pages: Pages, backend: Backend) -> tuple[codec.Encoded, torch.Tensor]:
    out = torch.full((pages.bound,), 0xA5, dtype=torch.uint8, device=pages.planes[0].device)
    books = [BOOK, None, BOOK]
    encoded = codec.encode_pages(
        pages.planes, books, pages.ids, pages.num_tokens, out, backend=backend
    )
    return encoded, out[: encoded.length].clone()


@pytest.mark.parametrize(("tokens", "slots", "dim", "kind"), CASES)
def test_kernels_write_and_read_the_reference_bytes(
    tokens: int, slots: int, dim: int, kind: str
) -> None:
    source = make_pages(tokens, num_planes=3, kv_heads=2, slots=slots, dim=dim, kind=kind)
    expected, payload = encode(source, reference)
    here = on_device(source)
    encoded, written = encode(here, cuda)
    assert encoded == expected
    assert torch.equal(written.cpu(), payload)
    target = on_device(source.empty_like())
    decoded = codec.decode_pages(
        payload.to(DEVICE), target.planes, [BOOK, None, BOOK], target.ids, tokens, backend=cuda
    )
    assert decoded.checksum == expected.checksum
    for plane, original in zip(target.planes, source.planes, strict=True):
        back = Pages([plane.cpu()], target.ids, tokens, source.generator)
        assert torch.equal(
            back.content(), Pages([original], source.ids, tokens, source.generator).content()
        )
    assert expected.checksum == codec.checksum_pages(here.planes, here.ids, tokens, backend=cuda)


@pytest.mark.parametrize(
    ("stream", "value"),
    [("count", [200, 0]), ("count", [9, 0]), ("position", [0xFF, 0xFF]), ("signs", [1, 2])],
)
def test_damaged_streams_are_refused_before_a_write(stream: str, value: list[int]) -> None:
    source = make_pages(17, num_planes=3, kv_heads=1, kind="normal")
    plane = source.planes[0].view(torch.int16)
    plane[source.ids[0], 0, 0, :8] = 7
    _, payload = encode(source, reference)
    entry = codec.read_header(payload).planes[0]
    at = {"count": 0, "signs": 600, "position": entry.length - 3 * 8}[stream]
    start = entry.offset + at
    payload[start : start + 2] = torch.tensor(value, dtype=torch.uint8)
    target = on_device(source.empty_like())
    before = [bits(plane).clone() for plane in target.planes]
    error = codec.ChecksumMismatch if stream == "signs" else codec.FormatError
    with pytest.raises(error):
        codec.decode_pages(
            payload.to(DEVICE), target.planes, [BOOK, None, BOOK], target.ids, 17, backend=cuda
        )
    if stream != "signs":
        for plane, was in zip(target.planes, before, strict=True):
            assert torch.equal(bits(plane), was)
