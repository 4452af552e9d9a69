"""Linear layers and embeddings on the CPU: one copy of each weight, and few kernels of oneDNN."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.nn import functional

from runtime.layers import onednn
from runtime.layers.embedding import embedding_op
from runtime.layers.linear import PackedLinear, linear_op
from runtime.layers.loops import K_BLOCK

WIDTH = 1024


def quantized(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return a weight that Q4_1 represents exactly: 4-bit codes with a scale and an offset."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (rows, columns // 32, 32), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, 15
    return (codes / 64 - 0.125).flatten(1)


def resident_bytes() -> int:
    """Return the resident memory of this process, after returning free memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def bf16(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16().float()


@pytest.mark.parametrize(("made", "most"), [(quantized, 1.5), (bf16, 2.25)])
def test_bytes_per_element_of_weights_in_memory(
    made: Callable[..., torch.Tensor], most: float
) -> None:
    """1.25 bytes as codes and 2 as bf16, and room for one weight as fp32; 4 more if kept twice."""
    layers = 24
    linear_op(made(WIDTH, WIDTH))(torch.zeros(40, WIDTH))  # compiles the loops
    before = resident_bytes()
    ops = [linear_op(made(WIDTH, WIDTH)) for _ in range(layers)]
    for op in ops:
        op(torch.zeros(40, WIDTH))
    used = resident_bytes() - before
    assert used < most * layers * WIDTH**2 + (4 << 20)


def test_onednn_computes_few_different_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a compiled kernel for each."""
    packed = PackedLinear(quantized(64, 64), None)
    if packed.onednn is None:
        pytest.skip("oneDNN has other results on this processor")
    numbers = set()
    multiply = packed.onednn.multiply

    def counted(x: torch.Tensor) -> Any:
        numbers.add(len(x))
        return multiply(x)

    monkeypatch.setattr(packed.onednn, "multiply", counted)
    whole = torch.randn(512, 64, generator=torch.Generator().manual_seed(2))
    expected = packed(whole)
    for rows in range(1, 513):
        assert torch.equal(packed(whole[:rows]), expected[:rows])
    assert len(numbers) <= 48


@pytest.mark.parametrize("rows", [64, 100, 9000])
@pytest.mark.parametrize("kind", ["codes", "bf16", "fp32"])
def test_rows_of_an_embedding_are_those_of_its_weight(rows: int, kind: str) -> None:
    """9,000 rows of 512 columns are expanded in two parts."""
    weight = quantized(rows, 512) if kind == "codes" else bf16(rows, 512)
    if kind == "fp32":
        weight = weight + 2.0**-20
    head = linear_op(weight)
    tokens = torch.tensor([rows - 1, 0, 17, 17, rows // 2])
    for embed in (embedding_op(weight, head), embedding_op(weight)):
        assert torch.equal(embed(tokens), functional.embedding(tokens, weight))
        assert embed(tokens[:0]).shape == (0, 512)
        for wrong in (rows, -1):
            with pytest.raises(IndexError):
                embed(torch.tensor([0, wrong]))
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(3))
    y = head(x)
    torch.testing.assert_close(y, functional.linear(x, weight), rtol=1e-4, atol=1e-4)
    assert torch.equal(head(x[:3]), y[:3])


KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "codes": quantized,
    "bf16": bf16,
    "fp32": lambda rows, columns: bf16(rows, columns) + 2.0**-20,
}


@pytest.fixture
def order_by_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let oneDNN round products of 96 and more rows in another way, as it does with AVX-512."""
    multiply = onednn._multiply

    def ordered(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        y = multiply(x, packed)
        return y if len(x) < 96 else torch.nextafter(y, y + 1)

    monkeypatch.setattr(onednn, "_multiply", ordered)
    monkeypatch.setattr(onednn, "_BUFFERS", {})
    onednn._max_rows.cache_clear()
    yield
    onednn._max_rows.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("order_by_rows")
def test_onednn_is_not_used_if_its_sums_depend_on_the_number_of_rows(kind: str) -> None:
    packed = PackedLinear(KINDS[kind](100, 96), None)
    assert packed.onednn is None
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(4))
    whole = packed(x)
    for rows in (0, 1, 2, 16, 17, 95, 96, 130):
        assert torch.equal(packed(x[:rows]), whole[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_order_of_the_loops_with_and_without_onednn(kind: str) -> None:
    """Sums over more than one block of columns, with outputs that do not fill a block."""
    weight = KINDS[kind](150, K_BLOCK + 64)
    packed, loops = PackedLinear(weight, None), PackedLinear(weight, None)
    loops.onednn = None
    x = torch.randn(520, weight.shape[1], generator=torch.Generator().manual_seed(5))
    expected = loops(x)
    torch.testing.assert_close(expected, functional.linear(x, weight), rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 16, 17, 33, 128, 511, 520):
        assert torch.equal(packed(x[:rows]), expected[:rows]), rows
