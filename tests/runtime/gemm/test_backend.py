"""A model with backend "gemm" compared with the same model with backend "torch"."""

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.gemm.plan import KernelPlan
from runtime.models.model import Backend, Model
from runtime.pages.plan import PageCount
from tests.runtime.attention.samples import pages_of
from tests.runtime.device import DEVICE
from tests.runtime.tiny import CONFIG, tiny_checkpoint

pytestmark = [pytest.mark.triton, pytest.mark.long]

DENSE: tuple[int | None, ...] = (None,) * 7
FACTORIZED: tuple[int | None, ...] = (9, 5, 8, 12, 17, 11, 24)
MIXED: tuple[int | None, ...] = (9, None) * 3 + (24,)
FORCED = KernelPlan(forced=True)
BACKENDS: tuple[Backend, ...] = ("torch", "gemm")


@pytest.mark.parametrize(
    ("ranks", "bias", "head_norms", "plan"),
    [
        *((ranks, True, False, None) for ranks in (DENSE, FACTORIZED, MIXED)),
        *((ranks, False, False, FORCED) for ranks in (DENSE, FACTORIZED, MIXED)),
        *((ranks, False, True, None) for ranks in (DENSE, FACTORIZED, MIXED)),
        (FACTORIZED, True, True, FORCED),
    ],
)
def test_gemm_backend_matches_the_torch_backend(
    ranks: tuple[int | None, ...], bias: bool, head_norms: bool, plan: KernelPlan | None
) -> None:
    """Compare the logits of prefill in two chunks and of a decode step, which runs twice."""
    checkpoint = tiny_checkpoint(ranks=ranks, bias=bias, head_norms=head_norms)
    count, length = (3, 150) if DEVICE.type == "cuda" else (2, 22)  # the interpreter is slow
    texts = [
        [(7 * number + 3 * at) % CONFIG.vocab_size for at in range(length)]
        for number in range(count)
    ]
    pages = pages_of([len(text) for text in texts])
    found = []
    for backend in BACKENDS:
        model = Model(checkpoint, device=DEVICE, dtype=torch.float32, backend=backend, plan=plan)
        cache = model.new_cache(PageCount(32))
        logits = []
        for first, last in ((0, 16), (16, length - 1)):
            slices = [
                SequenceSlice(text[first:last], first, own)
                for text, own in zip(texts, pages, strict=True)
            ]
            logits.append(model.forward(Batch.of(slices, DEVICE), cache))
        new_tokens = [
            SequenceSlice(text[-1:], length - 1, own)
            for text, own in zip(texts, pages, strict=True)
        ]
        step = model.static_step(Batch.of(new_tokens, DEVICE), cache)
        logits += [step().clone(), step().clone()]
        assert torch.equal(logits[2], logits[3])
        found.append(torch.cat(logits))
    expected, got = found
    # The GEMM backend computes in bf16, the torch backend in fp32 here.
    torch.testing.assert_close(got, expected, rtol=0, atol=0.04 * float(expected.abs().max()))


def test_gemm_backend_with_head_norms_does_not_use_the_megakernel() -> None:
    models = [
        Model(tiny_checkpoint(head_norms=head_norms), device=DEVICE, backend="gemm")
        for head_norms in (False, True)
    ]
    assert [model.matmul for model in models] == ["gemm", "gemm"]
    assert models[0].unsupported_by_megakernel is None
    assert "normalize" in str(models[1].unsupported_by_megakernel)


def test_small_pages_are_not_supported_by_the_megakernel() -> None:
    model = Model(tiny_checkpoint(), device=DEVICE, page_size=8, backend="gemm")
    assert "pages of 8 tokens" in str(model.unsupported_by_megakernel)
