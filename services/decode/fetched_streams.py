"""Streams of a decode worker, whose KV it fetches from prefill workers."""

import asyncio
import time
from dataclasses import replace
from functools import partial

import structlog

from headrace.v1 import error_pb2, prefill_pb2, sampling_pb2
from runtime.engine import Arrived, Cancel, Reserve, Reserved, StepOutput
from runtime.errors import InvalidRequest
from runtime.pages.plan import PageCount
from runtime.pages.sent import SentTokens
from services.common.tracing import Kind
from services.decode.computed_here import ComputedHere
from services.decode.settings import DecodeSettings
from services.transfer.errors import ForeignSegment
from services.transfer.fetch import Fetch, FetchFailed, FetchTimes
from services.transfer.receiver import Receiver
from services.worker.lifecycle import Worker
from services.worker.stream_service import StreamService
from services.worker.streams import Stream
from services.worker.wire import token_from_message

log = structlog.get_logger()


class FetchedStreams(StreamService):
    """Streams of gateways whose KV is fetched from prefill workers.

    Pages are acquired in one order: **decode pages before prefill pages**. A prompt on a prefill
    worker then never waits for decode pages while its own pages keep out prompts that have decode
    pages, so that workers cannot wait for each other in a cycle. This holds whatever routers know
    or promise.

    A stream submits its reservation before it asks the prefill worker. If few pages are free, it
    waits for them first. Otherwise it asks at once (it is *early*), because the next step almost
    certainly reserves them. If that step defers the reservation nevertheless, the stream cancels
    the prefill at once, waits in its place in the engine's queue, and asks again once it has pages.
    The wait of an early stream is therefore bounded by one step of this worker, and no prompt is
    computed more than twice for this reason.

    KV of the first tokens of a prompt that this worker has in cached pages is not fetched. An early
    stream looks for them when it asks, while the pages may still be evicted. If the reservation
    then has fewer of them, the prefill is given back, too, and asked for again.

    If all but a few tokens of a prompt are in cached pages, this worker computes these itself, if
    that is predicted to be faster (`ComputedHere`). The prefill worker is not informed of such a
    stream. The engine decides when it admits the reservation: if it finds fewer cached pages than
    expected, the stream fetches the KV.

    With ``colocated``, the worker also computes the prompts of streams without a prefill worker.
    """

    def __init__(self, worker: Worker, receiver: Receiver, settings: DecodeSettings) -> None:
        super().__init__(worker)
        self._receiver = receiver
        self._settings = settings
        self._here = ComputedHere(worker, settings.compute_tokens)

    def deliver(self, output: StepOutput) -> None:
        """Pass on which pages are reserved or deferred, then the rest of the output.

        A stream that was to be computed here, but got a reservation, starts to fetch its KV.
        """
        for reserved in output.reserved:
            stream = self.streams.get(reserved.id)
            if stream and stream.reserved and not stream.reserved.done():
                if reserved.first_token < stream.asked_from:
                    self._give_back(stream)
                stream.reserved.set_result(reserved)
                if stream.may_compute:
                    stream.may_compute = 0
                    self._start_transfer(stream, stream.reserved)
        for key in output.deferred:
            if stream := self.streams.get(key):
                self._give_back(stream)
        for key in output.started:
            stream = self.streams.get(key)
            if stream and stream.reserved and not stream.reserved.done():
                stream.reserved = None
                self._here.start(stream)
        super().deliver(output)

    def _give_back(self, stream: Stream) -> None:
        """Cancel the early fetch of a stream, if it has one, before anything can be read.

        A fetch that was cancelled in an earlier step may still wait for its decodes to stop.
        """
        if stream.early and not stream.early.expired():
            stream.early.reschedule(asyncio.get_running_loop().time())

    def _refusal(self, stream: Stream) -> str | None:
        if stream.start.HasField("prefill") or self._settings.colocated:
            return None
        return "no prefill worker was given, and this worker is not colocated"

    def _admit(self, stream: Stream) -> None:
        if not stream.start.HasField("prefill"):
            super()._admit(stream)
            return
        stream.reserved = asyncio.get_running_loop().create_future()
        stream.may_compute = self._here.tokens_of(stream, self.streams.values())
        if stream.may_compute:
            self._submit(stream, Reserve(stream.request, may_compute=stream.may_compute))
            self._worker.report_postponed(stream.start.request.placement_id)
        else:
            self._start_transfer(stream, stream.reserved)

    def _computed(self, stream: Stream) -> None:
        super()._computed(stream)
        if stream.may_compute:
            self._here.complete(stream)

    def _start_transfer(self, stream: Stream, reserved: asyncio.Future[Reserved]) -> None:
        stream.transfer = asyncio.create_task(self._fetch(stream, reserved))
        stream.transfer.add_done_callback(lambda _: self._end_transfer(stream))

    def _free(self, stream: Stream) -> None:
        """Free the pages of an ended stream.

        A transfer that may write to them is cancelled first.
        """
        if stream.transfer is None or stream.decoding_since:
            super()._free(stream)
        elif stream.transfer is not asyncio.current_task():
            stream.transfer.cancel()

    def _end_transfer(self, stream: Stream) -> None:
        """End the transfer of a stream. If the stream has ended in the meantime, free its pages."""
        stream.transfer = None
        if stream.key not in self.streams:
            self._worker.engine.submit(Cancel(stream.key))

    async def _fetch(self, stream: Stream, reserved: asyncio.Future[Reserved]) -> None:
        """Fetch the prompt's KV and start to decode, or end the stream with an error."""
        try:
            await self._reserve_and_fetch(stream, reserved)
        except FetchFailed as failure:
            log.warning("fetch failed", **stream.log_fields, reason=failure.message[:300])
            stream.session.fail(stream, failure.code, failure.message, failure.worker_id)
        except Exception as error:
            log.exception("fetch failed unexpectedly", **stream.log_fields)
            self._fail(stream, error_pb2.ERROR_CODE_INTERNAL, f"fetch failed: {error!r}")

    async def _reserve_and_fetch(self, stream: Stream, reserved: asyncio.Future[Reserved]) -> None:
        """Reserve pages and fetch the prompt's KV, in the order that the class describes.

        Raises:
            FetchFailed: the KV did not arrive.
        """
        sent = self._worker.sent_tokens(stream.start.request)
        if reserved.done():
            log.debug("few tokens could not be computed here", **stream.log_fields)
        elif not self._has_room():
            self._submit(stream, Reserve(stream.request))
            self._worker.report_postponed(stream.start.request.placement_id)
        else:
            stream.asked_from = self._worker.engine.cached_tokens(stream.request)
            self._submit(stream, Reserve(stream.request, may_reuse=stream.asked_from))
            stream.early = asyncio.timeout(None)
            try:
                async with stream.early:
                    await self._fetch_kv(stream, reserved, replace(sent, first=stream.asked_from))
                return
            except TimeoutError:
                if not stream.early.expired():
                    raise
                self._worker.metrics.given_back.inc()
                self._worker.report_postponed(stream.start.request.placement_id)
                log.info("prefill given back: pages are not free", **stream.log_fields)
            finally:
                stream.early = None
        with stream.span.child("reserve"):
            first = stream.asked_from = (await reserved).first_token
        await self._fetch_kv(stream, reserved, replace(sent, first=first))

    async def _fetch_kv(
        self, stream: Stream, reserved: asyncio.Future[Reserved], sent: SentTokens
    ) -> None:
        """Fetch the prompt's KV into reserved pages, then add the sequence to the batch.

        Args:
            sent: what the prefill worker sends.

        Raises:
            FetchFailed: the KV did not arrive.
        """
        digest: asyncio.Future[str] | None = None
        watch = self._here.watch(sent)

        def take_first(message: prefill_pb2.FirstTokens) -> bool:
            watch.take_first(message)
            return self._take_first(stream, message)

        def start_decoding(times: FetchTimes) -> None:
            nonlocal digest
            watch.complete()
            if stream.key in self.streams:
                if self._settings.kv_digest:  # runs before the next step
                    digest = self._worker.digest(reserved.result().page_tables, sent)
                self._worker.engine.submit(Arrived(stream.key, tuple(stream.first)))
                stream.start_decoding()
                stream.stages.transfer = times.transfer
                stream.stages.verify = times.decode_kv

        with stream.span.child(
            "fetch_kv",
            Kind.CLIENT,
            {"headrace.prefill_worker": stream.start.prefill.worker_id},
        ) as span:
            fetch = Fetch(
                key=stream.key,
                prefill=stream.start.prefill,
                request=stream.start.request,
                reserved=reserved,
                sent=sent,
                on_first=take_first,
                on_scored=None if stream.scores is None else partial(self._take_scored, stream),
                on_verified=start_decoding,
                deadline_s=stream.deadline_s,
                span=span,
            )
            times = await self._receiver.fetch(fetch)
            self._worker.count_saved(sent)
            times.record(span)
            span.end(stream.decoding_since)
        self._record(stream, times, None if digest is None else await digest)

    def _has_room(self) -> bool:
        """Return whether the next step will probably reserve the pages of all waiting streams.

        Half of the pages and of the batch are left for running sequences. The load is that after
        the last step, so the answer may be wrong, which costs a cancelled prefill.
        """
        load = self._worker.engine.load
        waiting = [s for s in self.streams.values() if s.reserved and not s.reserved.done()]
        lengths = [
            len(s.request.tokens) - self._worker.sent_tokens(s.start.request).evicted
            for s in waiting
        ]
        need = PageCount.total(map(self._worker.engine.page_plan.received, lengths))
        return (
            load.waiting == 0
            and 2 * (load.running + len(waiting)) <= self._worker.sizes.limits.max_running
            and need.times(2).fits(load.pages_free)
        )

    def _take_scored(self, stream: Stream, piece: sampling_pb2.PromptLogprobs) -> None:
        """Send log probabilities of prompt tokens, unless they were sent before.

        Raises:
            ForeignSegment: they are malformed.
        """
        assert stream.scores is not None
        try:
            new = stream.scores.take(piece, self._worker.identity.model.vocab_size)
        except ValueError as error:
            raise ForeignSegment(str(error)) from error
        if new is not None:
            stream.session.push_scored(stream, new)

    def _take_first(self, stream: Stream, message: prefill_pb2.FirstTokens) -> bool:
        """Send the first tokens before the KV arrives; return True if all choices end with them.

        First tokens of a prompt that is computed again are dropped, because they were sent before.

        Raises:
            ForeignSegment: a token is malformed; none is sent then.
        """
        stream.stages.queue = message.queue_s
        stream.stages.prefill = message.prefill_s
        if stream.first:
            return False
        if stream.scores is not None and not stream.scores.complete:
            raise ForeignSegment("first tokens before all log probabilities of the prompt")
        stream.cached_tokens = min(message.reused_tokens, len(stream.request.tokens))
        request, model = stream.request, self._worker.identity.model
        try:
            stream.first += [
                token_from_message(
                    token,
                    index=len(request.tokens) - request.prompt_tokens,
                    vocab_size=model.vocab_size,
                    with_logprobs=request.sampling.logprobs is not None,
                )
                for token in message.tokens
            ]
        except InvalidRequest as error:
            raise ForeignSegment(f"malformed first tokens: {error}") from error
        for token in stream.first:
            stream.session.push(stream, token)
            self._worker.metrics.generation_tokens.inc()
        for token in stream.first:
            if reason := stream.ends_with(token, model.context_length):
                stream.session.finish(stream, token.choice, reason)
        return not stream.unfinished

    def _record(self, stream: Stream, times: FetchTimes, digest: str | None) -> None:
        self._worker.metrics.observe_stages(
            queue=stream.stages.queue,
            prefill=stream.stages.prefill,
            transfer=times.transfer,
            verify=times.decode_kv,
        )
        log.debug(
            "kv arrived",
            **stream.log_fields,
            segments=times.segments,
            raw_bytes=times.raw_bytes,
            wire_bytes=times.wire_bytes,
            seconds=round(time.perf_counter() - stream.began, 4),
        )
        if digest is not None:
            log.info("kv verified", **stream.log_fields, digest=digest)
