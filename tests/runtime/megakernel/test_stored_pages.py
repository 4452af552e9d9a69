"""Steps of the megakernel with attention over stored pages, on a Hopper GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.attention.base import Batch
from runtime.gemm.model import build_gemm_model
from runtime.kv.compressed import COMPRESSED
from runtime.kv.windowed import WindowedFormat
from runtime.megakernel.decode_step import decode_step, unsupported_by_megakernel
from runtime.megakernel.launch import MAX_SEQUENCES_WITHOUT_ATTENTION
from runtime.offline.bench.kv_formats import fdc_artifact, palu_artifact, shard_artifact
from runtime.pages.plan import PageCount
from tests.runtime.device import DEVICE
from tests.runtime.tiny import CONFIG, tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device"),
]

WIDE = replace(CONFIG, num_heads=4, head_dim=64, vocab_size=1300)
CALIBRATIONS = {
    "fdc": fdc_artifact(WIDE, (48, 32)),
    "palu": palu_artifact(WIDE, (48, 32), WIDE.num_kv_heads),
    "shard": shard_artifact(WIDE),
}
LENGTHS = (160, 1, 90, 280)  # a page leaves the window of the first sequence
PAGES = 20
"""Pages of a sequence, for its length in `LENGTHS` and two pages more."""


DENSE: tuple[int | None, ...] = (None,) * 7
FORMATS = ["fp8", "int4", "k4v2", "stream8", "stream4", "fdc", "palu", "shard"]


@pytest.mark.parametrize("count", [1, 3, MAX_SEQUENCES_WITHOUT_ATTENTION])
@pytest.mark.parametrize(
    ("name", "ranks", "bias"),
    [
        *((name, DENSE, False) for name in FORMATS),
        ("int4", DENSE, True),
        ("int4", (9, 5, 8, 12, 17, 11, 24), True),
        ("int4", (9, None, 8, None, 17, None, 24), False),
    ],
)
def test_step_matches_one_kernel_after_another(
    name: str, ranks: tuple[int | None, ...], bias: bool, count: int, tmp_path: Path
) -> None:
    """Compare three steps with the logits and the KV of `Model.forward`."""
    checkpoint = tiny_checkpoint(ranks=ranks, config=WIDE, bias=bias)
    spec = name
    if name in CALIBRATIONS:
        path = tmp_path / "calibration"
        replace(CALIBRATIONS[name], model_hash=checkpoint.model_hash).save(path)
        spec = f"{name}:{path}"
    model = build_gemm_model(checkpoint, device=DEVICE, kv_format=spec)
    assert unsupported_by_megakernel(model) is None
    assert isinstance(model.kv_format, WindowedFormat)
    batch = Batch.static(count, PAGES, DEVICE)
    tables = batch.page_table, torch.zeros_like(batch.page_table)
    batch = replace(batch, page_tables=tables)
    pages = torch.randperm(PAGES * count, generator=torch.Generator().manual_seed(count))
    tables[0].copy_(pages.view(count, PAGES))
    tables[1].copy_(pages.flip(0).view(count, PAGES))
    ours, reference = (model.new_cache(PageCount(len(pages), len(pages))) for _ in range(2))
    for (_, plane), tensor in zip(ours.layout.planes, ours.planes, strict=True):
        if plane.group != COMPRESSED:
            tensor.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    layers = [ours.layer(index) for index in range(WIDE.num_layers)]
    sources, targets = (table.flatten().long() for table in tables)
    positions = 16 * torch.arange(PAGES, device=DEVICE).repeat(count)
    model.kv_format.encoder(layers).encode(sources, targets, positions)
    for tensor, source in zip(reference.planes, ours.planes, strict=True):
        tensor.copy_(source)
    step = decode_step(model, batch, ours)
    for number in range(3):
        lengths = torch.tensor(LENGTHS[:count]) + 16 * number
        batch.tokens.copy_(torch.arange(count) * 5 + number)
        batch.lengths.copy_(lengths)
        batch.positions.copy_(lengths - 1)
        found, expected = step().clone(), model.forward(batch, reference)
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * scale)
        for (_, plane), tensor, source in zip(
            ours.layout.planes, ours.planes, reference.planes, strict=True
        ):
            if plane.group == COMPRESSED:
                assert torch.equal(tensor.view(torch.uint8), source.view(torch.uint8))
            else:
                torch.testing.assert_close(tensor, source, rtol=0, atol=0.08)
