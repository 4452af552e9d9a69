"""KV of formats other than `dense` between workers: their pages, and nothing else."""

import pytest

from runtime.kv.names import LOWRANK
from runtime.kv.registry import COMPRESSED
from tests.services.transfer.sampled_streams import ANSWER, idle, start, tokens_of
from tests.services.workers import Site, output_of, until


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*COMPRESSED, LOWRANK])
async def test_tokens_equal_those_of_one_worker(site: Site, name: str) -> None:
    prefill, decode = await site.prefill(kv_format=name), await site.decode(kv_format=name)
    lengths = (5, 16, 79, 80, 100, 300)
    local = [start(prefill.worker.service, prefill, length, None) for length in lengths]
    await until(lambda: idle(prefill))
    remote = [start(decode.worker.service, decode, length, prefill) for length in lengths]
    await until(lambda: idle(prefill, decode))
    assert [tokens_of(one) for one in remote] == [tokens_of(one) for one in local]
    assert all(len(tokens_of(one)) == ANSWER for one in local)
    assert not prefill.worker.sender.active


async def test_choices_share_the_compressed_pages_of_their_prompt(site: Site) -> None:
    prefill, decode = await site.prefill(kv_format="int4"), await site.decode(kv_format="int4")
    local = start(prefill.worker.service, prefill, 150, None, choices=3)
    await until(lambda: idle(prefill))
    remote = start(decode.worker.service, decode, 150, prefill, choices=3)
    await until(lambda: idle(prefill, decode))
    for choice in range(3):
        assert tokens_of(remote, choice) == tokens_of(local, choice)
        assert len(tokens_of(local, choice)) == ANSWER


@pytest.mark.parametrize("delivered", [1, 30, ANSWER - 1])
async def test_replayed_sequence_continues_exactly(site: Site, delivered: int) -> None:
    """Its delivered tokens attended compressed pages, so decode steps compute them again."""
    prefill, decode = await site.prefill(kv_format="k4v2"), await site.decode(kv_format="k4v2")
    whole = start(decode.worker.service, decode, 120, prefill)
    await until(lambda: idle(prefill, decode))
    tokens = tokens_of(whole)
    rest = start(decode.worker.service, decode, 120, prefill, delivered=tokens[:delivered])
    await until(lambda: idle(prefill, decode))
    assert tokens_of(rest) == tokens[delivered:]
    assert [token.index for token in output_of(rest).tokens] == list(range(delivered, ANSWER))
