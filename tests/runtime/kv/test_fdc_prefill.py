"""Prefill attention of `fdc` on projected queries and keys."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.attention.reference import ReferenceAttention
from runtime.errors import KVFormatError
from runtime.kv.dense import DenseFormat
from runtime.kv.fdc import FdcFormat, FdcOptions
from runtime.kv.windowed import WindowedFormat
from runtime.offline.bench.kv_formats import random_fdc
from tests.runtime.device import DEVICE, random
from tests.runtime.kv.compressed_data import PAGE, SMOLLM2_135M, gaussian

CONFIG = replace(SMOLLM2_135M, num_heads=4, num_kv_heads=2, num_layers=1)
PIECES = [(0, 40), (70, 3), (0, 1), (130, 150)]
"""Positions of the first new token, and numbers of new tokens, of each sequence."""


def attended(made: FdcFormat, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Batch]:
    """Return attention of prompts, K and V pages, and the batch."""
    counts = [-(-(first + tokens) // PAGE) for first, tokens in PIECES]
    ids = torch.split(
        torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)), counts
    )
    slices = [
        SequenceSlice([0] * tokens, first, pages.tolist())
        for (first, tokens), pages in zip(PIECES, ids, strict=True)
    ]
    batch = Batch.of(slices, DEVICE)
    k, v = (gaussian(CONFIG, sum(counts), seed).to(DEVICE) for seed in (1, 2))
    exact = DenseFormat(CONFIG, ReferenceAttention)
    layer = WindowedFormat(exact, made).layer(0)
    return layer.attend(q, (k, v), batch), k, v, batch


def queries(dtype: torch.dtype) -> Tensor:
    return random(sum(tokens for _, tokens in PIECES), 4, 64).to(dtype)


def test_prompts_attend_full_precision_keys_by_default() -> None:
    q = queries(torch.float32)
    got, k, v, batch = attended(random_fdc(CONFIG, (48, 16), DEVICE), q)
    assert torch.equal(got, ReferenceAttention().attend(q, k, v, batch))


def test_prompts_attend_projected_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference on the CPU: scores of projected queries and keys, exact values."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    made = random_fdc(CONFIG, (48, 16), DEVICE, compressed_prefill=True)
    made.fused = False
    q = queries(torch.float32)
    got, k, v, batch = attended(made, q)
    basis = made.layer(0).k_basis
    projector = basis @ basis.mT  # [kv_heads, dim, dim]
    projected = torch.einsum("pnsd,nde->pnse", k.float(), projector)
    expected = ReferenceAttention().attend(q, projected, v, batch)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)  # latents are bf16
    exact = ReferenceAttention().attend(q, k, v, batch)
    assert (got - exact).norm() > 0.2 * exact.norm()


def test_full_rank_is_exact_up_to_rounding() -> None:
    q = queries(torch.float32)
    made = random_fdc(CONFIG, (64,), DEVICE, compressed_prefill=True)
    got, k, v, batch = attended(made, q)
    expected = ReferenceAttention().attend(q, k, v, batch)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.triton
@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [(48, 16), (32, 64)])
def test_kernels_are_near_the_reference(ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    """Queries are rounded after the projection, and weights of the softmax, to bf16."""
    q = queries(dtype)
    made = random_fdc(CONFIG, ranks, DEVICE, compressed_prefill=True)
    got, *_ = attended(made, q)
    made.fused = False
    expected, *_ = attended(made, q)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert not torch.equal(got, expected)


def test_prompts_need_keys_projected_after_rope() -> None:
    with pytest.raises(KVFormatError, match="set prc"):
        FdcOptions(compressed_prefill=True, prc=False)
