"""`encode` and `decode` of single tensors: shapes, dtypes and lengths."""

import pytest
import torch

import codec
from codec.elements import INTEGER_TYPES, ElementType, element_of
from tests.codec.samples import EVERY, bits, dtype_of


@pytest.mark.parametrize("length", [0, 1, 2, 3, 31, 63, 1000, 1023, 1024, 1025, 4099])
@pytest.mark.parametrize("name", EVERY)
def test_tensors_of_any_length_round_trip(name: str, length: int) -> None:
    codebook = EVERY[name]
    dtype = dtype_of(name)
    tensor = (3 * torch.randn(length, generator=torch.Generator().manual_seed(length))).to(dtype)
    payload = codec.encode(tensor, codebook)
    assert payload.numel() <= codec.max_payload_bytes(length, element_of(dtype))
    decoded = codec.decode(payload, codebook, (length,))
    assert decoded.shape == (length,)
    assert decoded.dtype == dtype
    assert torch.equal(bits(decoded), bits(tensor))


@pytest.mark.parametrize("element", INTEGER_TYPES, ids=lambda element: element.name)
def test_integer_tensors_keep_their_dtype_and_their_extreme_values(element: ElementType) -> None:
    limits = torch.iinfo(element.dtype)
    tensor = torch.tensor([limits.min, limits.max, 0, 1, limits.min + 1], dtype=element.dtype)
    payload = codec.encode(tensor, None)
    decoded = codec.decode(payload, None, (5,))
    assert decoded.dtype == element.dtype
    assert torch.equal(decoded, tensor)
    header = codec.read_header(payload)
    assert header.element is element
    assert header.geometry.elements * element.size == tensor.nbytes


def test_decode_returns_the_shape_that_it_is_given(codebook: codec.Codebook) -> None:
    tensor = torch.randn(17, 3, 5).bfloat16()
    payload = codec.encode(tensor, codebook)
    for shape in (tensor.shape, (17, 15), (-1, 5), (255,), (-1,)):
        decoded = codec.decode(payload, codebook, shape)
        assert torch.equal(decoded, tensor.view(shape))
    scalar = codec.encode(tensor[0, 0, 0], codebook)
    assert codec.decode(scalar, codebook, ()).shape == ()
    with pytest.raises(TypeError):
        codec.decode(payload, codebook)  # type: ignore[call-arg]


@pytest.mark.parametrize("shape", [(17, 3, 4), (254,), (), (0,), (-1, 7), (-1, -1), (-2, 5)])
def test_decode_rejects_a_shape_with_another_number_of_elements(
    codebook: codec.Codebook, shape: tuple[int, ...]
) -> None:
    payload = codec.encode(torch.randn(17, 3, 5).bfloat16(), codebook)
    with pytest.raises(codec.ShapeMismatch):
        codec.decode(payload, codebook, shape)


def test_decode_writes_into_an_output_of_the_shape(codebook: codec.Codebook) -> None:
    tensor = torch.randn(17, 3, 5).bfloat16()
    payload = codec.encode(tensor.transpose(0, 2), codebook)
    out = torch.empty(5, 51, dtype=torch.bfloat16)
    assert codec.decode(payload, codebook, (5, 51), out=out) is out
    assert torch.equal(out.view(5, 3, 17), tensor.transpose(0, 2))
    with pytest.raises(codec.ShapeMismatch):
        codec.decode(payload, codebook, (51, 5), out=out)
    with pytest.raises(codec.InvalidBuffer):
        codec.decode(payload, codebook, (51, 5), out=out.t())


def test_decode_rejects_segments_of_pages_and_outputs_of_another_dtype(
    payload: torch.Tensor, codebook: codec.Codebook
) -> None:
    flat = codec.encode(torch.ones(12, dtype=torch.bfloat16), codebook)
    with pytest.raises(codec.FormatError):
        codec.decode(payload, codebook, (-1,))
    with pytest.raises(codec.UnsupportedDtype):
        codec.decode(flat, codebook, (12,), out=torch.empty(12))
    with pytest.raises(codec.InvalidCodebook):
        codec.decode(flat, codebook, (12,), out=torch.empty(12, dtype=torch.float16))
    with pytest.raises(codec.FormatError):
        codec.decode(flat, None, (12,), out=torch.empty(12, dtype=torch.float16))
    with pytest.raises(codec.UnsupportedDtype):
        codec.encode(torch.ones(12), codebook)
