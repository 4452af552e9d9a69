"""Compiled CPU attention equals the torch reference and does not depend on the batch."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.attention import dense_attention
from runtime.attention.base import Batch, DenseAttention, SequenceSlice
from runtime.attention.cpu import CompiledAttention
from runtime.attention.reference import ReferenceAttention
from runtime.cpu.jit import exp
from tests.runtime.attention.samples import batch_of, random_pages
from tests.runtime.tiny import CONFIG

SHAPES = [(6, 2, 16), (9, 3, 64), (4, 4, 20), (8, 1, 32), (14, 2, 64), (40, 2, 8)]
LENGTHS = [[1], [15, 17], [63, 1, 100], [16, 32, 1000]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("new", [1, 7, 33])
def test_attend_matches_the_reference_and_ignores_unused_slots(
    shape: tuple[int, int, int], lengths: list[int], new: int
) -> None:
    heads, kv_heads, dim = shape
    batch = batch_of(lengths, new)
    k, v = random_pages(lengths, kv_heads, dim)
    q = torch.randn(len(batch.tokens), heads, dim, generator=torch.Generator().manual_seed(4))
    expected = ReferenceAttention().attend(q, k, v, batch)
    got = CompiledAttention(heads, kv_heads, dim).attend(q, k, v, batch)
    # fp32 sums are computed in another order. The tolerance is absolute, because results are
    # averages of N(0, 1) values.
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("window", [1, 16, 40, 100])
@pytest.mark.parametrize("new", [1, 33])
def test_pages_before_the_window_are_not_read(window: int, new: int) -> None:
    lengths = [63, 1, 200]
    batch = batch_of(lengths, new)
    k, v = random_pages(lengths, 2, 16)
    for row, length in enumerate(batch.lengths.tolist()):
        tokens = int(batch.starts[row + 1] - batch.starts[row])
        left = batch.page_table[row, : max(0, length - tokens + 1 - window) // 16].long()
        k[left], v[left] = torch.nan, torch.nan
    q = torch.randn(len(batch.tokens), 6, 16, generator=torch.Generator().manual_seed(4))
    expected = ReferenceAttention(window).attend(q, k, v, batch)
    got = CompiledAttention(6, 2, 16, window).attend(q, k, v, batch)
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-6)


WINDOWS: list[int | None] = [None, 20]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backend", ["reference", "compiled"])
def test_attend_is_softmax_attention(backend: str, window: int | None) -> None:
    attention: DenseAttention = ReferenceAttention(window)
    if backend == "compiled":
        attention = CompiledAttention(6, 2, 16, window)
    lengths = [37]
    batch = batch_of(lengths, 5)
    k, v = random_pages(lengths, 2, 16)
    q = torch.randn(5, 6, 16, generator=torch.Generator().manual_seed(5))
    pages = batch.page_table[0].long()
    keys, values = (x[pages].transpose(0, 1).flatten(1, 2)[:, :37].float() for x in (k, v))
    for row in range(5):
        for head in range(6):
            visible = 37 - 5 + row + 1
            first = 0 if window is None else visible - window
            scores = keys[head // 3, first:visible] @ q[row, head] / 4.0
            expected = scores.softmax(0) @ values[head // 3, first:visible]
            got = attention.attend(q, k, v, batch)[row, head * 16 : head * 16 + 16]
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("evicted", [(0, 0, 0), (32, 160, 16)])
@pytest.mark.parametrize("shape", SHAPES)
def test_write_equals_the_reference_bit_for_bit(
    shape: tuple[int, int, int], evicted: tuple[int, ...]
) -> None:
    heads, kv_heads, dim = shape
    lengths = [63, 1, 100]
    batch = batch_of(lengths, 19, evicted=evicted)
    generator = torch.Generator().manual_seed(6)
    qkv = torch.randn(len(batch.tokens), (heads + 2 * kv_heads) * dim, generator=generator)
    qkv[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    qkv[1, -3:] = torch.tensor([torch.inf, torch.nan, 3.4e38])
    angles = torch.rand(200, dim // 2, generator=generator) * 6
    rope = (angles.cos(), angles.sin())
    written = []
    for attention in (ReferenceAttention(), CompiledAttention(heads, kv_heads, dim)):
        k, v = random_pages(lengths, kv_heads, dim)
        q = attention.write(qkv, rope, k, v, batch)
        written.append((q, k, v))
    for expected, got in zip(*written, strict=True):
        both_nan = expected.isnan() & got.isnan()  # torch produces several NaN patterns
        integers = torch.int32 if got.dtype == torch.float32 else torch.int16
        assert bool(((expected.view(integers) == got.view(integers)) | both_nan).all())


@pytest.mark.parametrize("shape", [*SHAPES, (6, 2, 80), (3, 1, 130)])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("window", [None, 40])
def test_decode_and_prefill_attention_give_the_same_bits(
    shape: tuple[int, int, int], page_size: int, window: int | None
) -> None:
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(7)
    k, v = (torch.randn(40, kv_heads, page_size, dim, generator=generator) for _ in "kv")
    pages = torch.randperm(40, generator=generator).tolist()
    attention = CompiledAttention(heads, kv_heads, dim, window)
    for length in (1, 63, 64, 65, 150):
        q = torch.randn(length, heads, dim, generator=generator)
        whole = Batch.of([SequenceSlice([0] * length, 0, pages)])
        last = Batch.of([SequenceSlice([0], length - 1, pages)])
        prompt = attention.attend(q, k.bfloat16(), v.bfloat16(), whole)
        alone = attention.attend(q[-1:].contiguous(), k.bfloat16(), v.bfloat16(), last)
        assert torch.equal(alone[0], prompt[-1]), length


@pytest.mark.parametrize("new", [1, 19])
@pytest.mark.parametrize("attention", [ReferenceAttention(), CompiledAttention(6, 2, 16)])
def test_eviction_changes_rope_and_not_where_tokens_are_written(
    attention: DenseAttention, new: int
) -> None:
    """A token of a sequence with evicted tokens has a later position at the same slot."""
    lengths, evicted = [63, 100], [48, 16]
    generator = torch.Generator().manual_seed(8)
    angles = torch.rand(200, 8, generator=generator) * 6
    batch, plain = batch_of(lengths, new, evicted=evicted), batch_of(lengths, new)
    qkv = torch.randn(len(batch.tokens), 10 * 16, generator=generator)
    k, v = random_pages(lengths, 2, 16)
    q = attention.write(qkv, (angles.cos(), angles.sin()), k, v, batch)
    for sequence, (length, gone) in enumerate(zip(lengths, evicted, strict=True)):
        rows = slice(sequence * new, (sequence + 1) * new)
        moved = angles[gone:]  # angles at positions that are `gone` tokens later
        k_plain, v_plain = random_pages(lengths, 2, 16)
        q_plain = attention.write(qkv, (moved.cos(), moved.sin()), k_plain, v_plain, plain)
        pages = batch.page_table[sequence, : -(-length // 16)].long()
        assert torch.equal(q[rows], q_plain[rows])
        for found, expected in ((k, k_plain), (v, v_plain)):
            bits = found[pages].view(torch.int16), expected[pages].view(torch.int16)
            assert torch.equal(*bits)
    assert torch.equal(attention.attend(q, k, v, batch), attention.attend(q, k, v, plain))
    last = batch.where_logits()
    assert last.lengths.tolist() == lengths
    assert last.positions.tolist() == [
        length + gone - 1 for length, gone in zip(lengths, evicted, strict=True)
    ]


def test_exp_is_within_two_ulp() -> None:
    xs = torch.cat([torch.linspace(-86.9, 0, 4001), -torch.logspace(-8, 1, 500)])
    got = torch.tensor([exp(x) for x in xs.numpy()], dtype=torch.float64)
    relative = (got / xs.double().exp() - 1).abs().max()
    assert relative < 2 * 2.0**-23
    assert exp(np.float32(0.0)) == 1.0
    assert exp(np.float32(-np.inf)) == 0.0


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "name"),
    [
        ("cpu", torch.float32, 64, "compiled"),
        ("cpu", torch.float32, 6, "reference"),
        ("cpu", torch.bfloat16, 64, "reference"),
        ("cuda", torch.bfloat16, 64, "triton"),
        ("cuda", torch.bfloat16, 256, "triton"),
        ("cuda", torch.float32, 128, "triton"),
        ("cuda", torch.float32, 256, "reference"),
    ],
)
def test_backend_for_each_device_dtype_and_head_size(
    device: str, dtype: torch.dtype, dim: int, name: str
) -> None:
    config = replace(CONFIG, head_dim=dim)
    assert dense_attention(config, torch.device(device), dtype).name == name


@pytest.mark.slow
def test_cpu_engine_does_not_import_triton_modules() -> None:
    script = """
import sys
from runtime.engine import Engine
from tests.runtime.tiny import tiny_model
tiny_model(), tiny_model(ranks=(5,) * 7)
with_triton = {"runtime.attention.gpu", "runtime.gemm.ops", "runtime.megakernel.launch"}
sys.exit(", ".join(with_triton & sys.modules.keys()) or None)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_batch_has_a_page_table_of_each_group() -> None:
    slices = [
        SequenceSlice([0], 99, range(7), more_pages=[[-1, 5, 3]]),
        SequenceSlice([0], 9, [8], more_pages=[[]]),
    ]
    batch = Batch.of(slices)
    assert batch.of_group(0) is batch
    assert batch.page_table.tolist() == [[*range(7)], [8, *[0] * 6]]
    assert batch.of_group(1).page_table.tolist() == [[0, 5, 3, 0, 0, 0, 0], [0] * 7]
    assert batch.of_group(1) is batch.of_group(1)
    assert batch.where_logits().of_group(1).page_table.tolist() == [[0, 5, 3, 0, 0, 0, 0], [0] * 7]
    assert Batch.of([SequenceSlice([0], 99, range(7))]).page_tables == ()


@pytest.mark.parametrize("compressed", [[5, 3], []])
def test_batch_of_slices_that_use_different_groups_is_refused(compressed: list[int]) -> None:
    prompt = SequenceSlice([0] * 20, 0, [1, 2])
    decode = SequenceSlice([0], 99, range(7), more_pages=[compressed])
    for slices in ([prompt, decode], [decode, prompt]):
        with pytest.raises(ValueError, match="in more page groups than others"):
            Batch.of(slices)
