"""Decode workers and a prefill worker never wait for each other's pages in a cycle.

In each test, early prompts are queued on a prefill worker whose pages they fill. Later prompts fill
the pages of the decode workers and need pages of the prefill worker as well.
"""

from collections.abc import Iterator
from random import Random
from unittest.mock import Mock

import pytest

from headrace.v1 import decode_pb2
from services.common.placement import Placement, Role
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.fleet import Fleet, FleetLimits
from services.router.queue import PlacementQueue
from services.worker.lifecycle import Worker
from services.worker.registration import Registrar
from services.worker.streams import StreamSession
from tests.services.router.samples import beat, place_request, registration
from tests.services.workers import (
    LIMIT_S,
    Decode,
    Prefill,
    Site,
    message_of,
    open_stream,
    output_of,
    start_stream,
    until,
)

TOKENS, OUTPUTS = 48, 4  # a prompt has three pages
EARLY, LATER = 2, 4
PREFILL_PAGES = 3 * EARLY
DECODE_PAGES = {1: 13, 2: 12}
"""Pages of each decode worker, by the number of decode workers. They are ample for its early
prompts, but not for a later one, and the later ones leave less than a prompt and a page."""


class Workers:
    """A prefill worker whose engine has not started, and decode workers."""

    def __init__(self, prefill: Prefill, *decodes: Decode) -> None:
        self.prefill = prefill
        self.decodes = decodes
        self._sessions: list[StreamSession] = []
        self.admitted: dict[str, list[str]] = {}
        for worker in (prefill.worker, *(decode.worker for decode in decodes)):
            admitted = self.admitted[worker.identity.worker_id] = []
            worker.registrar = Mock(spec=Registrar, admit=admitted.append)

    async def open(self, decode: Decode, placement_id: str = "placement") -> None:
        """Open a stream, and wait until the decode worker has done what it can do."""
        number = len(self._sessions) + 1
        start = decode_pb2.StartStream(
            stream=number,
            epoch=decode.worker.identity.epoch,
            prefill=self.prefill.address,
            deadline_s=LIMIT_S,
            request=message_of(TOKENS, OUTPUTS),
        )
        start.request.placement_id = placement_id
        session = start_stream(decode.worker.service, start)
        self._sessions.append(session)
        jobs = len(self.prefill.worker.jobs)
        engine = decode.worker.engine
        await until(lambda: len(self.prefill.worker.jobs) > jobs or engine.load.waiting > 0)
        await until(lambda: engine.load.commands == engine.submitted)

    async def open_whole(self, outputs: int) -> None:
        """Open a stream of the prefill worker, which serves the whole request."""
        start = decode_pb2.StartStream(
            stream=len(self._sessions) + 1,
            epoch=self.prefill.address.epoch,
            deadline_s=LIMIT_S,
            request=message_of(10, outputs),
        )
        self._sessions.append(start_stream(self.prefill.worker.service, start))

    async def finish(self) -> None:
        """Start the prefill worker's engine, and check that all streams end with their tokens."""
        self.prefill.worker.engine.start()
        workers = self.prefill.worker, *(decode.worker for decode in self.decodes)
        await until(lambda: all(worker.idle for worker in workers))
        outputs = [output_of(session) for session in self._sessions]
        assert not [output.error.message for output in outputs if output.HasField("error")]
        tokens = {tuple(t.token for t in output.tokens) for output in outputs}
        assert {len(each) for each in tokens} <= {OUTPUTS, 20}
        assert len(tokens) == len({len(each) for each in tokens}), "equal prompts, equal tokens"
        for worker in workers:
            await until(lambda w=worker: w.engine.load.pages_free == w.engine.pages_total)  # type: ignore[misc]


async def workers_of(
    site: Site, *, decodes: int = 1, prefill_pages: int = PREFILL_PAGES
) -> Workers:
    prefill = await site.prefill(started=False, pages=prefill_pages)
    pages = DECODE_PAGES[decodes]
    return Workers(prefill, *[await site.decode(pages=pages) for _ in range(decodes)])


async def test_prompts_with_decode_pages_do_not_wait_for_prompts_without(site: Site) -> None:
    workers = await workers_of(site)
    for _ in range(EARLY + LATER):
        await workers.open(workers.decodes[0])
    await workers.finish()


async def test_decode_workers_share_a_prefill_worker_without_deadlock(site: Site) -> None:
    workers = await workers_of(site, decodes=2)
    for decode in workers.decodes:
        await workers.open(decode)
    for decode in workers.decodes:
        for _ in range(LATER):
            await workers.open(decode)
    await workers.finish()


async def test_whole_requests_of_a_prefill_worker_do_not_wait_for_decode_pages(site: Site) -> None:
    """The prefill worker's own sequence outgrows its page, and must be computed again."""
    workers = await workers_of(site, prefill_pages=PREFILL_PAGES + 1)
    await workers.open_whole(outputs=20)
    for _ in range(EARLY + LATER):
        await workers.open(workers.decodes[0])
    await workers.finish()


class Router:
    """A router that knows the workers from their heartbeats and its own placements."""

    def __init__(self, workers: Workers) -> None:
        self._all = workers
        limits = FleetLimits()
        queue = PlacementQueue(64)
        self._dispatcher = Dispatcher(
            *(Fleet(limits), queue, PolicyName.SHORTEST_QUEUE, Random(0)),
            output_reserve=256,
            max_wait_s=9,
        )
        for worker, role in self._workers():
            known = registration(
                worker.identity.worker_id, role, pages_total=worker.engine.pages_total
            )
            self._dispatcher.register(known, 0.0)

    def _workers(self) -> Iterator[tuple[Worker, Role]]:
        yield self._all.prefill.worker, Role.PREFILL
        for decode in self._all.decodes:
            yield decode.worker, Role.DECODE

    async def place(self, now: float) -> bool:
        """Place a request with the workers' current loads and open its stream, if it fits."""
        for worker, _ in self._workers():
            load, name = worker.engine.load, worker.identity.worker_id
            known = beat(
                name,
                pages_free=load.pages_free,
                running=load.running,
                waiting=load.waiting,
                admitted=self._all.admitted[name],
            )
            self._dispatcher.heartbeat(known, now)
        self._dispatcher.advance(now)
        answer = self._dispatcher.submit(place_request(TOKENS, OUTPUTS, wait_s=0), now).answer
        if not isinstance(answer, Placement):
            return False
        chosen = answer.decode.worker_id
        for decode in self._all.decodes:
            if decode.worker.identity.worker_id == chosen:
                await self._all.open(decode, answer.placement_id)
        return True


@pytest.mark.parametrize("decodes", [1, 2])
async def test_placements_of_two_routers_do_not_deadlock(site: Site, decodes: int) -> None:
    """The second router does not know the placements of the first one."""
    workers = await workers_of(site, decodes=decodes)
    first, second = Router(workers), Router(workers)
    for number in range(EARLY):
        assert await first.place(now=0.1 * number)
    placed = [await second.place(now=1 + 0.1 * number) for number in range(LATER * decodes)]
    assert any(placed)
    await workers.finish()


async def test_placements_of_a_restarted_router_do_not_deadlock(site: Site) -> None:
    workers = await workers_of(site)
    router = Router(workers)
    for number in range(EARLY):
        assert await router.place(now=0.1 * number)
    router = Router(workers)
    placed = [await router.place(now=1 + 0.1 * number) for number in range(LATER)]
    assert any(placed)
    await workers.finish()


async def test_placements_after_the_first_ones_expired_do_not_deadlock(site: Site) -> None:
    workers = await workers_of(site)
    router = Router(workers)
    for number in range(EARLY):
        assert await router.place(now=0.1 * number)
    later = FleetLimits().placement_ttl_s + 1
    placed = [await router.place(now=later + 0.1 * number) for number in range(LATER)]
    assert any(placed)
    await workers.finish()


async def test_early_prefill_is_given_back_if_the_next_step_reserves_no_pages(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first token was sent already; the prompt is computed again and the stream continues."""
    prefill = await site.prefill(pages=PREFILL_PAGES)
    decode = await site.decode(started=False, pages=4)
    monkeypatch.setattr(decode.worker.service, "_has_room", lambda: True)
    streams = [open_stream(decode, prefill, number, TOKENS, OUTPUTS) for number in (1, 2)]
    await until(lambda: all(len(output_of(s.session).tokens) == 1 for s in streams))
    decode.worker.engine.start()
    await until(lambda: decode.worker.idle and prefill.worker.idle)
    first, second = ([t.token for t in output_of(s.session).tokens] for s in streams)
    assert len(first) == OUTPUTS
    assert first == second
    assert prefill.metric("headrace_worker_generation_tokens_total") == 3, (
        "one prompt is computed twice"
    )
    value = decode.worker.metrics.registry.get_sample_value
    assert value("headrace_worker_prefills_given_back_total") == 1
