"""Evicted prompts between workers: what is kept arrives, and both sides agree on how much."""

import pytest

from headrace.v1 import error_pb2
from headrace.v1 import prefill_pb2 as pb
from runtime.pages.eviction import evicted_tokens
from runtime.pages.sizes import sequence_bytes
from services.transfer.outgoing import Outgoing
from tests.services.transfer.sampled_streams import ANSWER, idle, start, tokens_of
from tests.services.workers import Decode, Prefill, Site, output_of, until

pytestmark = pytest.mark.slow

SHARE = 0.5
LENGTHS = (5, 127, 128, 150, 176, 300)


async def pair(site: Site, name: str, **changes: object) -> tuple[Prefill, Decode]:
    options = {"kv_format": name, "kv_eviction": SHARE, **changes}
    return await site.prefill(**options), await site.decode(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dense", "int4"])
async def test_tokens_equal_those_of_one_worker(site: Site, name: str) -> None:
    prefill, decode = await pair(site, name)
    local = [start(prefill.worker.service, prefill, length, None) for length in LENGTHS]
    await until(lambda: idle(prefill))
    remote = [start(decode.worker.service, decode, length, prefill) for length in LENGTHS]
    await until(lambda: idle(prefill, decode))
    assert [tokens_of(one) for one in remote] == [tokens_of(one) for one in local]
    assert all(len(tokens_of(one)) == ANSWER for one in local)
    assert not prefill.worker.sender.active


async def test_choices_share_what_is_kept(site: Site) -> None:
    prefill, decode = await pair(site, "dense")
    local = start(prefill.worker.service, prefill, 150, None, choices=3)
    await until(lambda: idle(prefill))
    remote = start(decode.worker.service, decode, 150, prefill, choices=3)
    await until(lambda: idle(prefill, decode))
    for choice in range(3):
        assert tokens_of(remote, choice) == tokens_of(local, choice)
        assert len(tokens_of(local, choice)) == ANSWER


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["dense", "int4"])
@pytest.mark.parametrize("delivered", [1, 30, ANSWER - 1])
async def test_replayed_sequence_continues_exactly(site: Site, name: str, delivered: int) -> None:
    """Its delivered tokens attended what was kept, so decode steps compute them again."""
    prefill, decode = await pair(site, name)
    whole = start(decode.worker.service, decode, 140, prefill)
    await until(lambda: idle(prefill, decode))
    tokens = tokens_of(whole)
    rest = start(decode.worker.service, decode, 140, prefill, delivered=tokens[:delivered])
    await until(lambda: idle(prefill, decode))
    assert tokens_of(rest) == tokens[delivered:]
    assert [token.index for token in output_of(rest).tokens] == list(range(delivered, ANSWER))


async def test_answers_of_one_token_need_no_kv(site: Site) -> None:
    prefill, decode = await pair(site, "dense")
    session = start(decode.worker.service, decode, 150, prefill, answer=1)
    await until(lambda: idle(prefill, decode))
    assert len(tokens_of(session)) == 1
    assert not output_of(session).HasField("error")


async def test_wire_carries_what_is_kept(site: Site) -> None:
    prefill, decode = await pair(site, "dense")
    start(decode.worker.service, decode, 300, prefill)
    await until(lambda: idle(prefill, decode))
    kept = 300 - evicted_tokens(300, SHARE, 16)
    assert kept == 300 - 144
    expected = sequence_bytes(prefill.loaded.rank.executor.cache.layout.page_bytes, kept)
    value = prefill.worker.metrics.registry.get_sample_value

    def sent() -> float:
        return value("headrace_kv_sent_bytes_total", {"kind": "raw"}) or 0.0

    await until(lambda: sent() >= expected)  # a segment is counted after its reader knows it
    assert sent() == expected


@pytest.mark.parametrize("other", [0.0, 0.25])
async def test_worker_with_another_share_is_refused(site: Site, other: float) -> None:
    prefill, decode = await pair(site, "dense")
    another = await site.decode(kv_eviction=other)
    session = start(another.worker.service, another, 150, prefill)
    await until(lambda: output_of(session).HasField("error"))
    assert output_of(session).error.code == error_pb2.ERROR_CODE_INCOMPATIBLE
    assert "kv_eviction" in output_of(session).error.message
    assert decode.worker.idle


async def test_another_number_of_evicted_tokens_fails_the_transfer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair(site, "dense")

    def announce(outgoing: Outgoing) -> None:
        if outgoing.computed and not any(outgoing.planned):
            done = pb.PrefillDone(
                sequence=outgoing.sequence, segments=outgoing.issued, evicted_tokens=80
            )
            outgoing.emit(pb.PrefillEvent(done=done))

    monkeypatch.setattr(Outgoing, "announce_if_complete", announce)
    session = start(decode.worker.service, decode, 150, prefill)
    await until(lambda: output_of(session).HasField("error"))
    assert "80 tokens were evicted, not 64" in output_of(session).error.message
    await until(lambda: idle(prefill, decode))
