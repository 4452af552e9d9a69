"""Copies of tensors to the device: contents, and reuse of buffers and device memory."""

import pytest
import torch

from runtime.graphs.upload import Uploader

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_tensors_on_the_cpu_are_not_copied() -> None:
    tensor = torch.zeros(4 << 20)
    with Uploader(CPU) as upload:
        assert upload(tensor) is tensor


def test_cuda_without_an_index_is_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with Uploader(torch.device("cuda")) as upload:
        assert upload.device == torch.device("cuda:3")


@pytest.mark.gpu
@needs_gpu
def test_large_tensors_are_copied_to_the_current_gpu() -> None:
    values = torch.arange(8 << 20, dtype=torch.int32)
    with Uploader(torch.device("cuda")) as upload:
        assert torch.equal(upload(values).cpu(), values)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("elements", [0, 1, 1000, 4 << 20, (4 << 20) + 1, 33_000_001])
def test_contents_are_equal_on_the_device(elements: int) -> None:
    values = torch.randint(-(1 << 15), 1 << 15, (elements,), dtype=torch.int16).view(torch.bfloat16)
    with Uploader(GPU) as upload:
        found = upload(values)
    assert found.is_cuda
    assert torch.equal(found.cpu().view(torch.int16), values.view(torch.int16))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 2000), (1001, 3001), (0, 3001)])
def test_columns_of_a_matrix_are_contiguous_on_the_device(first: int, last: int) -> None:
    matrix = torch.randn(9001, 3001).bfloat16()
    with Uploader(GPU) as upload:
        found = upload(matrix[:, first:last])
    assert found.is_contiguous()
    assert torch.equal(found.cpu(), matrix[:, first:last])


@pytest.mark.gpu
@needs_gpu
def test_strided_tensors_and_tensors_on_the_device_are_supported() -> None:
    strided = torch.randn(3000, 3000).t()
    with Uploader(GPU) as upload:
        found = upload(strided)
        assert upload(found) is found
    assert torch.equal(found.cpu(), strided)


@pytest.mark.gpu
@needs_gpu
def test_device_memory_in_use_is_not_overwritten_and_results_can_be_used_at_once() -> None:
    """Each round frees a tensor while kernels that read it still run."""
    sources = [torch.full((2 << 20, 8), number, dtype=torch.float32) for number in range(6)]
    sums = []
    with Uploader(GPU) as upload:
        for source in sources:
            tensor = upload(source)
            for _ in range(20):
                tensor = tensor * 1.0
            sums.append(tensor.double().sum())
            del tensor
    expected = [number * sources[0].numel() for number in range(6)]
    assert [int(value) for value in sums] == expected
