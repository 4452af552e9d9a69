"""The megakernel compared with a model with backend "torch", on a Hopper GPU."""

from dataclasses import replace

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.checkpoint import Checkpoint
from runtime.gemm.weights import PackedWeights
from runtime.layers.rope import cos_sin_table
from runtime.megakernel.launch import DecodeStep
from runtime.models.build import build_model
from runtime.pages.plan import PageCount
from tests.runtime.attention.samples import pages_of
from tests.runtime.device import DEVICE
from tests.runtime.tiny import CONFIG, tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device"),
]

LARGE = replace(
    CONFIG, hidden_size=1040, intermediate_size=4200, num_heads=16, num_kv_heads=1, head_dim=128,
    context_length=3072,
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "bias"),
    [
        ((None,) * 7, True),
        ((9, 5, 8, 12, 17, 11, 24), True),
        ((9, None, 8, None, 17, None, 24), False),
    ],
)
@pytest.mark.parametrize("tall", [0, 48])
@pytest.mark.parametrize(
    "positions", [(0,), (37, 16), (130, 1, 63), (300, 17, 128, 129, 5, 0, 64, 16)]
)
def test_step_matches_the_model(
    ranks: tuple[int | None, ...], bias: bool, positions: tuple[int, ...], tall: int
) -> None:
    """Cover dense, factorized and mixed layers, with and without tall tiles."""
    programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    check_step(tiny_checkpoint(ranks=ranks, bias=bias), positions, programs, tall)


@pytest.mark.parametrize("ranks", [(None,) * 7, (300, 100, 90, 200, 1100, 1060, 1500)])
@pytest.mark.parametrize("tall", [0, 1 << 20])
@pytest.mark.parametrize(("programs", "positions"), [(3, (3000, 0)), (2, (400,)), (40, (3000,))])
def test_large_step_of_few_programs_matches_the_model(
    ranks: tuple[int | None, ...], programs: int, positions: tuple[int, ...], tall: int
) -> None:
    """Cover many tiles per program, inputs too wide for registers, and 16 heads per KV head."""
    check_step(tiny_checkpoint(ranks=ranks, config=LARGE), positions, programs, tall)


def check_step(
    checkpoint: Checkpoint, positions: tuple[int, ...], programs: int, tall: int
) -> None:
    """Compare logits and KV pages of three launches with those of the torch backend."""
    config = checkpoint.config
    model = build_model(checkpoint, device=DEVICE, dtype=torch.float32)
    pages = pages_of([position + 1 for position in positions])
    cache = model.new_cache(PageCount(sum(map(len, pages)) + 1))
    texts = [
        [(7 * number + 3 * at) % config.vocab_size for at in range(position + 1)]
        for number, position in enumerate(positions)
    ]
    before = [
        SequenceSlice(text[:-1], 0, own, want_logits=False)
        for text, own in zip(texts, pages, strict=True)
        if len(text) > 1
    ]
    if before:
        model.forward(Batch.of(before, DEVICE), cache)
    rope = cos_sin_table(config, config.context_length)
    step = DecodeStep(
        PackedWeights.pack(checkpoint, DEVICE),
        cache.planes,
        (rope[0].to(DEVICE), rope[1].to(DEVICE)),
        Batch.static(len(positions), max(map(len, pages)), DEVICE),
        programs=programs,
        tall=tall,
    )
    step.batch.tokens.copy_(torch.tensor([text[-1] for text in texts]))
    step.batch.positions.copy_(torch.tensor(positions))
    step.batch.lengths.copy_(torch.tensor(positions) + 1)
    for row, own in enumerate(pages):
        step.batch.page_table[row, : len(own)] = torch.tensor(own)
    written = []
    for _ in range(3):
        step.launch()
        written.append((step.logits.clone(), [plane.clone() for plane in cache.planes]))
    last = [
        SequenceSlice(text[-1:], len(text) - 1, own) for text, own in zip(texts, pages, strict=True)
    ]
    expected = model.forward(Batch.of(last, DEVICE), cache)
    for logits, planes in written:
        # The megakernel computes in bf16, the model in fp32.
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=0.01 * float(expected.abs().max())
        )
        for plane, other in zip(planes, cache.planes, strict=True):
            torch.testing.assert_close(plane, other, rtol=0, atol=0.04)
