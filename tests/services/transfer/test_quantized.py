"""KV with calibrated codes between workers: pages and tokens are identical after the wire."""

from pathlib import Path

import pytest
import torch

from runtime.pages.groups import Part
from tests.runtime.kv.calibrated import QUANTIZED, quantized_spec
from tests.services.transfer.sampled_streams import ANSWER, idle, start, tokens_of
from tests.services.workers import Site, until

pytestmark = pytest.mark.slow


@pytest.mark.few(1)
@pytest.mark.parametrize("name", QUANTIZED)
async def test_tokens_equal_those_of_one_worker(site: Site, name: str, tmp_path: Path) -> None:
    spec = quantized_spec(name, tmp_path)
    prefill, decode = await site.prefill(kv_format=spec), await site.decode(kv_format=spec)
    lengths = (79, 100, 300)
    local = [start(prefill.worker.service, prefill, length, None) for length in lengths]
    await until(lambda: idle(prefill))
    remote = [start(decode.worker.service, decode, length, prefill) for length in lengths]
    await until(lambda: idle(prefill, decode))
    assert [tokens_of(one) for one in remote] == [tokens_of(one) for one in local]
    assert all(len(tokens_of(one)) == ANSWER for one in local)


@pytest.mark.parametrize("name", QUANTIZED)
async def test_encoded_pages_are_identical_after_the_wire(
    site: Site, name: str, tmp_path: Path
) -> None:
    """No page leaves the window while 2 tokens are decoded."""
    spec = quantized_spec(name, tmp_path)
    prefill, decode = await site.prefill(kv_format=spec), await site.decode(kv_format=spec)
    start(decode.worker.service, decode, 300, prefill, answer=2)
    await until(lambda: idle(prefill, decode))
    for (_, plane), sent, received in zip(
        prefill.loaded.rank.executor.cache.layout.planes,
        prefill.loaded.rank.executor.cache.planes,
        decode.loaded.rank.executor.cache.planes,
        strict=True,
    ):
        if plane.group.part is not Part.MIDDLE:
            continue
        pages = [
            {bytes(page.flatten().view(torch.uint8).numpy()) for page in x}
            for x in (sent, received)
        ]
        assert len(pages[0]) > 10
        assert pages[0] == pages[1]
