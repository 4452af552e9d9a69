"""The Triton attention kernels compared with the torch reference."""

import pytest
import torch
from torch.nn import functional

from runtime.attention import gpu, splits
from runtime.attention.gpu import HeadNorms, TritonAttention
from runtime.attention.reference import ReferenceAttention
from runtime.gemm.weights import by_halves
from tests.runtime.attention.samples import batch_of, random_pages
from tests.runtime.combinations import combinations
from tests.runtime.device import DEVICE, random

pytestmark = [pytest.mark.triton, pytest.mark.long]

SHAPES = [(6, 2, 16), (9, 3, 64), (4, 4, 96), (8, 1, 128), (5, 5, 20)]
"""Query heads, KV heads, head dimension."""
CASES = [
    # shape, lengths, new tokens per sequence, dtype of queries
    ((6, 2, 16), [1], 1, torch.float32),
    ((6, 2, 16), [63, 1, 100], 1, torch.bfloat16),
    ((9, 3, 64), [15, 17], 1, torch.float32),
    ((4, 4, 96), [16, 32, 200], 1, torch.float32),
    ((8, 1, 128), [63, 1, 100], 1, torch.bfloat16),
    ((5, 5, 20), [15, 17], 1, torch.float32),
    ((6, 2, 16), [1], 7, torch.float32),
    ((9, 3, 64), [63, 1, 100], 7, torch.bfloat16),
    ((4, 4, 96), [15, 17], 40, torch.float32),
    ((8, 1, 128), [16, 32, 100], 40, torch.float32),
    ((5, 5, 20), [63, 1, 100], 40, torch.bfloat16),
    ((4, 2, 64), [300], 290, torch.float32),
    ((4, 2, 64), [128, 256, 64], 256, torch.bfloat16),
]


def counters_are_zero(attention: TritonAttention) -> bool:
    """Return whether all counters of partial results are zero, as between launches."""
    return not any(bool(each.counters.any()) for each in attention._splits._buffers.values())


@pytest.mark.parametrize(("shape", "lengths", "new", "dtype"), CASES)
def test_attend_matches_the_reference_and_reads_no_stale_slot(
    shape: tuple[int, int, int], lengths: list[int], new: int, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = shape
    batch = batch_of(lengths, new, DEVICE)
    k, v = random_pages(lengths, kv_heads, dim, DEVICE)
    q = random(len(batch.tokens), heads, dim).to(dtype)
    expected = ReferenceAttention().attend(q, k, v, batch)
    attention = TritonAttention(heads, kv_heads, dim)
    got = attention.attend(q, k, v, batch)
    # Weights are rounded to bf16 before they are multiplied by values.
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    again = attention.attend(q, k, v, batch)  # reuses the buffers of partial results
    assert torch.equal(got, again)


@pytest.mark.parametrize(
    ("shape", "lengths", "new"), [((4, 2, 64), [300, 20], 20), ((2, 1, 128), [300], 290)]
)
def test_prefill_with_many_programs_uses_larger_blocks(
    shape: tuple[int, int, int],
    lengths: list[int],
    new: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "_MIN_PREFILL_PROGRAMS", 0)
    assert TritonAttention(*shape)._query_block(new) == (128, 8)
    test_attend_matches_the_reference_and_reads_no_stale_slot(shape, lengths, new, torch.bfloat16)


@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize(
    "lengths", [[20], [5, 33], [700, 1, 2], [64] * 5, [1, 300, 64, 65, 1, 130, 9]]
)
def test_decode_is_independent_of_how_tiles_are_divided(
    programs: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program takes all tiles, or a head is merged from splits of up to 11 programs."""
    monkeypatch.setattr(splits, "decode_programs", lambda device, each: programs)
    attention = TritonAttention(4, 2, 16)
    batch = batch_of(lengths, 1, DEVICE)
    k, v = random_pages(lengths, 2, 16, DEVICE)
    q = random(len(lengths), 4, 16)
    expected = ReferenceAttention().attend(q, k, v, batch)
    got = attention.attend(q, k, v, batch)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert counters_are_zero(attention)


@pytest.mark.parametrize(("merged", "least"), [(4, 1), (32, 3)])
@pytest.mark.parametrize("group", [1, 2, 3, 12])
def test_many_splits_are_merged_in_several_iterations(
    merged: int, least: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "decode_programs", lambda device, each: 30)
    monkeypatch.setattr(splits, "_MERGED", max(merged, min(group, 8)))
    monkeypatch.setattr(gpu, "MIN_TILES", least)
    batch = batch_of([1000], 1, DEVICE)
    k, v = random_pages([1000], 2, 16, DEVICE)
    q = random(1, 2 * group, 16)
    expected = ReferenceAttention().attend(q, k, v, batch)
    got = TritonAttention(2 * group, 2, 16).attend(q, k, v, batch)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sequences", [1, 3])
def test_lengths_may_change_between_launches(sequences: int) -> None:
    """A CUDA graph replays the same launch with other lengths in the same tensors."""
    heads, kv_heads, dim = 6, 2, 32
    attention = TritonAttention(heads, kv_heads, dim)
    reference = ReferenceAttention()
    for longest in (300, 64, 65, 1):
        lengths = [max(1, longest - 13 * number) for number in range(sequences)]
        batch = batch_of(lengths, 1, DEVICE)
        k, v = random_pages(lengths, kv_heads, dim, DEVICE)
        q = random(sequences, heads, dim)
        got, expected = (a.attend(q, k, v, batch) for a in (attention, reference))
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert counters_are_zero(attention)


def random_rope(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(200, dim // 2, generator=torch.Generator().manual_seed(6)) * 6
    return angles.cos().to(DEVICE), angles.sin().to(DEVICE)


@pytest.mark.parametrize(
    ("shape", "new", "dtype", "evicted"),
    combinations(SHAPES, [1, 19], [torch.float32, torch.bfloat16], [(0, 0, 0), (32, 160, 16)]),
)
def test_write_matches_the_reference(
    shape: tuple[int, int, int], new: int, dtype: torch.dtype, evicted: tuple[int, ...]
) -> None:
    heads, kv_heads, dim = shape
    lengths = [63, 1, 100]
    batch = batch_of(lengths, new, DEVICE, evicted=evicted)
    qkv = random(len(batch.tokens), (heads + 2 * kv_heads) * dim).to(dtype)
    rope = random_rope(dim)
    found = []
    for attention in (ReferenceAttention(), TritonAttention(heads, kv_heads, dim)):
        k, v = random_pages(lengths, kv_heads, dim, DEVICE)
        found.append((attention.write(qkv, rope, k, v, batch), k, v))
    for expected, got in zip(*found, strict=True):
        # A fused multiply-add rounds once instead of twice.
        torch.testing.assert_close(
            got.float(), expected.float(), rtol=8e-3, atol=1e-5, equal_nan=True
        )
        assert torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize(
    ("shape", "new", "dtype", "halves"),
    combinations(
        SHAPES,
        [1, 19],
        [torch.float32, torch.bfloat16],
        [False, True],
        valid=lambda shape, new, dtype, halves: not halves or shape[2] % 16 == 0,
    ),
)
def test_write_with_head_norms_matches_norm_then_write(
    shape: tuple[int, int, int], new: int, dtype: torch.dtype, halves: bool
) -> None:
    """Compare with torch's RMSNorm of q and k, followed by the reference's RoPE and page write."""
    heads, kv_heads, dim = shape
    lengths = [63, 1, 100]
    eps = 1e-6
    batch = batch_of(lengths, new, DEVICE)
    qkv = 3 * random(len(batch.tokens), heads + 2 * kv_heads, dim).to(dtype)
    norms = HeadNorms(1 + 0.3 * random(dim, seed=7), 1 + 0.3 * random(dim, seed=8), eps)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    normed = [
        functional.rms_norm(part.float(), (dim,), weight, eps).to(dtype)
        for part, weight in ((q, norms.q), (k, norms.k))
    ]
    rope = random_rope(dim)
    k_expected, v_expected = random_pages(lengths, kv_heads, dim, DEVICE)
    q_expected = ReferenceAttention().write(
        torch.cat([*normed, v], dim=1).flatten(1), rope, k_expected, v_expected, batch
    )
    flat = qkv.flatten(1)
    if halves:
        flat = by_halves(flat.t().contiguous(), dim).t().contiguous()
    k_pages, v_pages = random_pages(lengths, kv_heads, dim, DEVICE)
    attention = TritonAttention(heads, kv_heads, dim, by_halves=halves)
    q_got = attention.write(flat, rope, k_pages, v_pages, batch, norms)
    # Normalized values of up to 8 are rounded to bf16, and RoPE adds two of them. Each may differ
    # from the expected one by a bf16 step of 1/32: the order of summation is another one, and
    # Triton's interpreter truncates where a GPU rounds.
    atol = 1e-5 if dtype == torch.float32 else 0.07
    got, expected = (q_got, k_pages, v_pages), (q_expected, k_expected, v_expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=8e-3, atol=atol, equal_nan=True)
