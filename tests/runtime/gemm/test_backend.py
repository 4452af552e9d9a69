"""A model over packed weights compared with the same model with torch's matmuls."""

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.gemm.model import build_gemm_model
from runtime.gemm.plan import KernelPlan
from runtime.megakernel.decode_step import decode_step, unsupported_by_megakernel
from runtime.models.build import build_model
from runtime.pages.plan import PageCount
from tests.runtime.attention.samples import pages_of
from tests.runtime.device import DEVICE
from tests.runtime.tiny import CONFIG, tiny_checkpoint

pytestmark = [pytest.mark.triton, pytest.mark.long]

DENSE: tuple[int | None, ...] = (None,) * 7
FACTORIZED: tuple[int | None, ...] = (9, 5, 8, 12, 17, 11, 24)
MIXED: tuple[int | None, ...] = (9, None) * 3 + (24,)
FORCED = KernelPlan(forced=True)


@pytest.mark.parametrize(
    ("ranks", "bias", "head_norms", "plan"),
    [
        *((ranks, True, False, None) for ranks in (DENSE, FACTORIZED, MIXED)),
        *((ranks, False, False, FORCED) for ranks in (DENSE, FACTORIZED, MIXED)),
        *((ranks, False, True, None) for ranks in (DENSE, FACTORIZED, MIXED)),
        (FACTORIZED, True, True, FORCED),
    ],
)
def test_gemm_model_matches_the_torch_model(
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
    models = (
        build_model(checkpoint, device=DEVICE),
        build_gemm_model(checkpoint, device=DEVICE, plan=plan),
    )
    for model in models:
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
        step = decode_step(model, Batch.of(new_tokens, DEVICE), cache)
        logits += [step().clone(), step().clone()]
        assert torch.equal(logits[2], logits[3])
        found.append(torch.cat(logits))
    expected, got = found
    # The GEMM kernels compute in bf16, torch in fp32 here.
    torch.testing.assert_close(got, expected, rtol=0, atol=0.04 * float(expected.abs().max()))


def test_gemm_model_with_head_norms_does_not_use_the_megakernel() -> None:
    models = [
        build_gemm_model(tiny_checkpoint(head_norms=head_norms), device=DEVICE)
        for head_norms in (False, True)
    ]
    assert [model.matmul for model in models] == ["gemm", "gemm"]
    assert unsupported_by_megakernel(models[0]) is None
    assert "normalize" in str(unsupported_by_megakernel(models[1]))


def test_small_pages_are_not_supported_by_the_megakernel() -> None:
    model = build_gemm_model(tiny_checkpoint(), device=DEVICE, page_size=8)
    assert "pages of 8 tokens" in str(unsupported_by_megakernel(model))
