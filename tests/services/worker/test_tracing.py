"""Spans of prefill and decode workers, below the span that a gateway names."""

import asyncio
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from headrace.v1 import decode_pb2, request_pb2
from tests.services.otlp_collector import (
    PARENT,
    TRACE,
    TRACEPARENT,
    CollectedSpan,
    Collector,
    collecting_own_spans,
)
from tests.services.workers import (
    LIMIT_S,
    Site,
    message_of,
    open_stream,
    output_of,
    start_stream,
    until,
)

CONTEXT = request_pb2.TraceContext(traceparent=TRACEPARENT)
STREAM, PROMPT = "Decode/StartStream", "Prefill/StartPrefill"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting_own_spans("decode") as started:
        yield started


async def collected(collector: Collector, *names: str) -> list[CollectedSpan]:
    """Wait for spans with these names, and return them."""
    await until(lambda: set(names) <= set(collector.names))
    return [collector.named(name) for name in names]


def start_of(prefill: decode_pb2.WorkerAddress | None, epoch: str) -> decode_pb2.StartStream:
    """Return the start of a traced stream; without a prefill worker, of a whole request."""
    return decode_pb2.StartStream(
        stream=1,
        epoch=epoch,
        prefill=prefill,
        deadline_s=LIMIT_S,
        request=message_of(100),
        trace=CONTEXT,
    )


async def test_fetched_stream_has_a_span_for_each_stage(site: Site, collector: Collector) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    start = start_of(prefill.address, decode.worker.identity.epoch)
    with capture_logs() as lines:
        start_stream(decode.worker.service, start)
        names = (STREAM, "fetch_kv", PROMPT, "queue", "prefill", "encode", "transfer", "decode_kv")
        spans = await collected(collector, *names, "decode")
    stream, fetch, prompt, queue, computed, encode, transfer, decode_kv, decoded = spans
    assert {span.trace for span in collector.spans} == {TRACE}
    assert len(collector.spans) == len(spans)
    assert (stream.parent, stream.kind) == (PARENT, "server")
    assert (fetch.parent, fetch.kind) == (stream.id, "client")
    assert (prompt.parent, prompt.kind) == (fetch.id, "server")
    assert {span.parent for span in (queue, computed, encode)} == {prompt.id}
    assert {span.parent for span in (transfer, decode_kv)} == {fetch.id}
    assert decoded.parent == stream.id
    assert not any(span.failed for span in spans)

    assert queue.end_ns == computed.start_ns
    assert fetch.start_ns <= prompt.start_ns <= queue.start_ns <= encode.start_ns
    assert encode.start_ns <= transfer.start_ns <= decode_kv.start_ns
    assert fetch.contains(transfer)
    assert fetch.contains(decode_kv)
    assert fetch.end_ns <= decoded.start_ns + 1000
    assert stream.contains(decoded)

    assert transfer.attributes["headrace.kv.segments"] > 1
    assert transfer.attributes["headrace.kv.raw_bytes"] > 0
    assert transfer.attributes["headrace.busy_seconds"] > 0
    assert stream.attributes["headrace.request.id"] == start.request.request_id
    assert fetch.attributes["headrace.prefill_worker"] == prefill.address.worker_id
    ids = {line["event"]: line.get("span_id") for line in lines if line.get("trace_id") == TRACE}
    assert ids["stream admitted"] == ids["kv arrived"] == stream.id
    assert ids["prefill admitted"] == prompt.id


async def test_history_that_is_read_has_spans_below_the_prefill(
    site: Site, collector: Collector
) -> None:
    decode = await site.decode(prefix_cache=True)
    for number in range(2):  # the second prefill worker has nothing cached
        prefill = await site.prefill(prefix_cache=True)
        start = start_of(prefill.address, decode.worker.identity.epoch)
        if number == 0:
            start.ClearField("trace")
        start_stream(decode.worker.service, start)
        await until(lambda: decode.worker.idle)
    names = ("fetch_kv", "read_history", "queue", "pin")
    fetch, read, queue, pin = await collected(collector, *names)
    await until(lambda: collector.names.count(PROMPT) == 2)
    forward, pinned = sorted(
        (span for span in collector.spans if span.name == PROMPT), key=lambda span: span.start_ns
    )
    assert (forward.parent, pinned.parent) == (fetch.id, read.id)
    assert (read.parent, read.kind) == (forward.id, "client")
    assert (queue.parent, pin.parent) == (forward.id, pinned.id)
    assert queue.contains(read)
    assert read.contains(pin)
    assert read.attributes["headrace.decode_worker"] == decode.worker.identity.worker_id
    assert read.attributes["headrace.tokens"] == 96
    assert not any(span.failed for span in collector.spans)


async def test_whole_request_has_a_span_for_each_stage(site: Site, collector: Collector) -> None:
    prefill = await site.prefill()
    session = start_stream(prefill.worker.service, start_of(None, prefill.worker.identity.epoch))
    spans = await collected(collector, STREAM, "queue", "prefill", "decode")
    stream, queue, computed, decoded = spans
    assert len(collector.spans) == len(spans)
    assert {span.parent for span in (queue, computed, decoded)} == {stream.id}
    assert stream.contains(queue)
    assert stream.contains(decoded)
    assert (queue.end_ns, computed.end_ns) == (computed.start_ns, decoded.start_ns)
    stages = output_of(session).stages
    assert stages.queue == pytest.approx((queue.end_ns - queue.start_ns) / 1e9, abs=1e-5)
    assert stages.prefill == pytest.approx((computed.end_ns - computed.start_ns) / 1e9, abs=1e-5)
    assert 0 < stages.decode <= (decoded.end_ns - decoded.start_ns) / 1e9


async def test_forced_decode_steps_of_a_replay_are_not_in_the_stage_decode(
    site: Site, collector: Collector
) -> None:
    """Replays with a compressed KV format recompute the delivered tokens in decode steps."""
    prefill = await site.prefill(kv_format="fp8")
    start = start_of(None, prefill.worker.identity.epoch)
    start.request.prompt_tokens -= 90  # of 100 tokens
    start.request.max_tokens = 92
    session = start_stream(prefill.worker.service, start)
    spans = await collected(collector, STREAM, "queue", "prefill", "decode")
    _, _, computed, decoded = spans
    assert not output_of(session).HasField("error")
    assert computed.end_ns == decoded.start_ns
    assert computed.end_ns - computed.start_ns > decoded.end_ns - decoded.start_ns
    assert output_of(session).stages.decode <= (decoded.end_ns - decoded.start_ns) / 1e9


async def test_stream_that_ends_with_its_first_token_has_the_stages_of_its_prompt(
    site: Site,
) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    start = start_of(prefill.address, decode.worker.identity.epoch)
    start.request.max_tokens = 1
    session = start_stream(decode.worker.service, start)
    await until(lambda: not session.streams)
    stages = output_of(session).stages
    assert stages.queue > 0
    assert stages.prefill > 0


async def test_failed_fetch_names_the_reason_on_each_worker(
    site: Site, collector: Collector
) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    prefill.worker.draining = True
    start_stream(decode.worker.service, start_of(prefill.address, decode.worker.identity.epoch))
    stream, fetch = await collected(collector, STREAM, "fetch_kv")
    assert stream.failed
    assert fetch.failed
    assert stream.attributes["error.type"] == fetch.attributes["error.type"] == "draining"
    assert fetch.message == "this worker is draining"


async def test_cancelled_stream_ends_its_spans(site: Site, collector: Collector) -> None:
    prefill, decode = await site.prefill(started=False), await site.decode()
    session = start_stream(
        decode.worker.service, start_of(prefill.address, decode.worker.identity.epoch)
    )
    await until(lambda: bool(prefill.worker.jobs))
    session.end(session.streams[1])
    stream, fetch, prompt = await collected(collector, STREAM, "fetch_kv", PROMPT)
    assert fetch.attributes["error.type"] == "cancelled"
    assert not any(span.failed for span in (stream, fetch, prompt))


@pytest.mark.parametrize("traceparent", ["", "nonsense", TRACEPARENT + "x" * 4096])
async def test_malformed_context_of_a_gateway_is_ignored(
    traceparent: str, site: Site, collector: Collector
) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    start = start_of(prefill.address, decode.worker.identity.epoch)
    start.trace.traceparent = traceparent
    session = start_stream(decode.worker.service, start)
    await until(lambda: not session.streams)
    assert not output_of(session).HasField("error")
    await asyncio.sleep(0.05)
    assert not collector.spans


async def test_stream_without_tracing_sends_no_context(site: Site) -> None:
    prefill, decode = await site.prefill(started=False), await site.decode()
    stream = open_stream(decode, prefill, 1, 40)
    assert not stream.span.headers
    await until(lambda: bool(prefill.worker.jobs))
    (job,) = prefill.worker.jobs.values()
    assert not job.outgoing.span.recording
