"""Workers that differ in one property: served with the same tokens, or refused with a reason."""

from dataclasses import replace
from typing import Any

import pytest

from headrace.v1 import error_pb2
from services.common.placement import Compatibility
from services.transfer.fetch import FetchFailed
from services.worker.loading import Loaded
from tests.runtime.tiny import engine_of, executor_of
from tests.services import workers
from tests.services.router.test_unmatched import OTHER
from tests.services.workers import (
    SLOT_BYTES,
    Decode,
    Prefill,
    Site,
    fetch_of,
    open_stream,
    output_of,
    until,
)

TOKENS = 100  # several chunks and segments


async def _tokens(site: Site, prefill: dict[str, Any], decode: dict[str, Any]) -> list[int]:
    """Return the tokens of a request on two new workers."""
    sender, reader = await site.prefill(**prefill), await site.decode(**decode)
    stream = open_stream(reader, sender, 1, TOKENS)
    await until(lambda: reader.worker.idle)
    output = output_of(stream.session)
    assert not output.HasField("error"), output.error
    return [token.token for token in output.tokens]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"slot_bytes": 2 * SLOT_BYTES}, {}),
        ({}, {"slot_bytes": 2 * SLOT_BYTES}),
        ({"slots": 2}, {"slots": 8}),
        ({"slots": 8}, {"slots": 2}),
        ({}, {"credits_per_sequence": 1}),
    ],
    ids=str,
)
async def test_slabs_of_other_sizes_are_served(
    site: Site, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    assert await _tokens(site, prefill, decode) == await _tokens(site, {}, {})


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "changes",
    [{"max_running": 1}, {"step_tokens": 32}, {"pages": 9}, {"max_waiting": 1}],
    ids=str,
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_other_batches_steps_and_numbers_of_pages_are_served(
    site: Site, monkeypatch: pytest.MonkeyPatch, role: str, changes: dict[str, Any]
) -> None:
    expected = await _tokens(site, {}, {})
    loaded_of = workers.loaded_of

    def different(settings: Any, pages: int) -> Loaded:
        loaded = loaded_of(settings, pages)
        if type(settings).__name__.lower().startswith(role):
            engine = engine_of(loaded.rank.executor.model, **changes)
            loaded = workers.with_rank(loaded, executor=executor_of(engine))
            return replace(loaded, engine=engine)
        return loaded

    monkeypatch.setattr(workers, "loaded_of", different)
    assert await _tokens(site, {}, {}) == expected


@pytest.mark.parametrize("name", OTHER)
async def test_other_property_is_refused_in_the_handshake_with_the_reason(
    site: Site, name: str
) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    identity = prefill.loaded.identity
    different = identity.compatibility.model_dump() | {name: OTHER[name]}
    if name == "codec":
        different[name] = "splitzip"
    prefill.worker.identity = replace(identity, compatibility=Compatibility(**different))
    with pytest.raises(FetchFailed) as failed:
        await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))
    assert failed.value.code == error_pb2.ERROR_CODE_INCOMPATIBLE
    values = (identity, prefill.worker.identity)
    own, other = (repr(getattr(each.compatibility_message(), name)) for each in values)
    if name == "page_plan":
        own = 'page_size: 16 groups { name: "kv" part: "all" }'
        other = 'page_size: 32 groups { name: "kv" part: "all" }'
    expected = f"{name}: decode worker has {own}, prefill worker has {other}"
    assert expected in failed.value.message
    assert prefill.worker.idle


async def _refusal(prefill: Prefill, decode: Decode) -> str:
    with pytest.raises(FetchFailed) as failed:
        await decode.worker.receiver.fetch(fetch_of(prefill, TOKENS))
    assert failed.value.code == error_pb2.ERROR_CODE_INCOMPATIBLE
    return failed.value.message


async def test_ranks_with_other_kv_heads_are_refused(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    hello = decode.worker._clients._hello.endpoints[0]
    hello.num_kv_heads = 3
    assert "KV heads: only the decode worker has head 2" in await _refusal(prefill, decode)
    hello.num_kv_heads = 1
    assert "KV heads: only the prefill worker has head 1" in await _refusal(prefill, decode)
    hello.num_kv_heads = 2
    prefill.worker.endpoints[0].readable.num_kv_heads = 1
    assert "only the decode worker has head 1" in await _refusal(prefill, decode)


async def test_slots_must_hold_a_page_of_the_kv_heads_that_are_sent_together(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    hello = decode.worker._clients._hello
    hello.slot_bytes = prefill.worker.endpoints[0].codecs.max_page_frame_bytes(1)
    refusal = await _refusal(prefill, decode)
    assert f"slot_bytes: decode worker has {hello.slot_bytes}, but one page" in refusal
    hello.endpoints[0].num_kv_heads = 1
    hello.endpoints.add(first_kv_head=1, num_kv_heads=1)
    client = await decode.worker._clients.connect(prefill.address)
    assert client.alive
