"""The Triton backend against the reference, on `DEVICE`. `test_kernels.py` runs these.

Each check is a plain test function; with `TRITON_INTERPRET=1` they run on CPU tensors.
"""

import pytest
import torch

import codec
from codec import cuda, reference
from codec.format import Geometry, Layout, Mode
from codec.ops import Backend
from tests.codec.samples import Pages, bits, make_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WINDOW = tuple(range(114, 130))
GAPS = (3, *range(114, 128), 250)
CASES = [
    # tokens, slots, dim, kind, slot bytes, exponents
    (1, 16, 64, "normal", 8, WINDOW),
    (17, 16, 64, "mixed", 8, WINDOW),
    (31, 16, 64, "random", 16, WINDOW),
    (17, 16, 80, "mixed", 32, GAPS),
    (17, 16, 128, 0.004, 8, WINDOW),
    (20, 16, 64, 0.05, 32, GAPS),
    (9, 4, 37, "mixed", 16, WINDOW),
    (3, 1, 1, "random", 32, WINDOW),
    (0, 16, 64, "normal", 8, WINDOW),
]


def on_device(pages: Pages) -> Pages:
    planes = [plane.to(DEVICE) for plane in pages.planes]
    return Pages(planes, pages.ids, pages.num_tokens, pages.generator)


def encode(
    pages: Pages, backend: Backend, book: codec.Codebook
) -> tuple[codec.Encoded, torch.Tensor]:
    out = torch.full((pages.bound,), 0xA5, dtype=torch.uint8, device=pages.planes[0].device)
    encoded = codec.encode_pages(
        pages.planes, [book, None, book], pages.ids, pages.num_tokens, out, backend=backend
    )
    return encoded, out[: encoded.length].clone()


@pytest.mark.parametrize(("tokens", "slots", "dim", "kind", "slot_bytes", "exponents"), CASES)
def test_kernels_write_and_read_the_reference_bytes(
    tokens: int,
    slots: int,
    dim: int,
    kind: str | float,
    slot_bytes: int,
    exponents: tuple[int, ...],
) -> None:
    book = codec.Codebook(exponents, slot_bytes=slot_bytes)
    source = make_pages(tokens, num_planes=3, kv_heads=2, slots=slots, dim=dim, kind=kind)
    expected, payload = encode(source, reference, book)
    here = on_device(source)
    encoded, written = encode(here, cuda, book)
    assert encoded == expected
    assert torch.equal(written.cpu(), payload)
    target = on_device(source.empty_like())
    decoded = codec.decode_pages(
        payload.to(DEVICE), target.planes, [book, None, book], target.ids, tokens, backend=cuda
    )
    assert decoded.checksum == expected.checksum
    for plane, original in zip(target.planes, source.planes, strict=True):
        back = Pages([plane.cpu()], target.ids, tokens, source.generator)
        assert torch.equal(
            back.content(), Pages([original], source.ids, tokens, source.generator).content()
        )
    assert codec.checksum_pages(here.planes, here.ids, tokens, backend=cuda) == (
        codec.checksum_pages(source.planes, source.ids, tokens, backend=reference)
    )


def test_no_kernel_is_given_less_than_it_touches() -> None:
    pages = on_device(make_pages(17, num_planes=1, kv_heads=1))
    geometry = Geometry(1, 64, 17, 16)
    layout = Layout.of(geometry, [Mode.TOP16], 8)
    plan = cuda.Plan(
        pages.planes, [codec.Codebook(WINDOW)], torch.tensor(pages.ids), geometry, layout
    )
    short = torch.zeros(layout.bound - 1, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(codec.InvalidBuffer):
        plan.encode(short)
    with pytest.raises(codec.InvalidBuffer):
        plan.decode(short[: layout.spill - 1])


@pytest.mark.parametrize("damage", [(0, 200), (0, 255), (1, 255), (2, 255), (600, 1)])
def test_damaged_blocks_are_errors_and_stay_within_their_pages(damage: tuple[int, int]) -> None:
    book = codec.Codebook(WINDOW)
    source = make_pages(17, num_planes=3, kv_heads=1, kind="normal")
    plane = source.planes[0].view(torch.int16)
    plane[source.ids[0], 0, 0, :2] = 7
    _, payload = encode(source, reference, book)
    at, value = damage
    payload[codec.read_header(payload).layout.blocks[0] + at] = value
    target = on_device(source.empty_like())
    before = [bits(plane).clone() for plane in target.planes]
    with pytest.raises((codec.FormatError, codec.ChecksumMismatch)):
        codec.decode_pages(
            payload.to(DEVICE), target.planes, [book, None, book], target.ids, 17, backend=cuda
        )
    others = [page for page in range(len(before[0])) if page not in target.ids]
    for plane, was in zip(target.planes, before, strict=True):
        assert torch.equal(bits(plane)[others], was[others])
