"""Memory of partial attention results; every batch size uses the same buffers."""

import pytest

from runtime.kv.gpu import CompressedPageKernels
from runtime.kv.quantized import QuantizedFormat
from runtime.kv.registry import COMPRESSED
from tests.runtime.device import DEVICE
from tests.runtime.kv.compressed_data import LLAMA_3_8B

pytestmark = pytest.mark.triton

PROGRAMS = 528
"""Programs of the kernel on an H100 or H200: four for each of 132 multiprocessors."""


def kernels() -> CompressedPageKernels:
    kv_format = COMPRESSED["int4"](LLAMA_3_8B)
    assert isinstance(kv_format, QuantizedFormat)
    found = kv_format.kernels(DEVICE)
    assert isinstance(found, CompressedPageKernels)
    return found


def splits_of(sequences: int) -> int:
    """Return the splits of a batch, as `CompressedPageKernels.attend` computes them."""
    return 2 * (PROGRAMS + sequences * LLAMA_3_8B.num_kv_heads)


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [range(1, 257), range(256, 0, -1)], ids=["rising", "falling"])
def test_memory_does_not_grow_with_the_number_of_batch_sizes(sizes: range) -> None:
    shared = kernels()
    layers = [shared.of_layer(shared.inputs) for _ in range(2)]
    held: dict[int, int] = {}
    for sequences in sizes:
        for layer in layers:
            buffers = layer._split_buffers(splits_of(sequences), DEVICE)
            assert all(len(buffer) >= splits_of(sequences) for buffer in buffers)
            held |= {buffer.data_ptr(): buffer.nbytes for buffer in buffers}
    largest = sum(buffer.nbytes for buffer in kernels()._split_buffers(splits_of(256), DEVICE))
    assert sum(held.values()) < 2 * largest


def test_buffers_that_graphs_hold_are_kept() -> None:
    made = kernels()
    small = made._split_buffers(splits_of(1), DEVICE)
    address = small[0].data_ptr()
    del small
    made._split_buffers(splits_of(256), DEVICE)
    assert address in {acc.data_ptr() for acc, *_ in made._results}
