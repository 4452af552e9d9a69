"""Placement of attempts of requests, including the wait for routers and workers."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from services.common.encoder_placement import EncodePlaceRequest
from services.common.errors import (
    Overloaded,
    QueueTimeout,
    ServiceError,
    TooLarge,
    Unavailable,
)
from services.common.messages import MAX_WAIT_S
from services.common.placement import PlaceRequest
from services.common.tracing import Kind, Span
from services.gateway.metrics import GatewayMetrics
from services.gateway.requests import GenerationRequest, RequestContext
from services.gateway.retries import Retries, backoff_s
from services.gateway.router_answers import ExceedsWorkers, NoRouter
from services.gateway.router_client import RoutedEncode, RoutedPlacement, RouterClient

R = TypeVar("R")


@dataclass
class Siblings:
    """State that the prompts of one client request share.

    Prompts are placed one at a time, so that they do not queue behind each other. The first one is
    admitted for all of them.

    Attributes:
        turn: lock that a prompt holds while it is placed.
        admitted: whether a prompt was placed.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    admitted: bool = False


class Placer:
    """Places attempts through the routers.

    Args:
        queue_wait_s: maximum time in a router's queue, seconds.
    """

    def __init__(
        self, router: RouterClient, metrics: GatewayMetrics, *, model: str, queue_wait_s: float
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._model = model
        self._queue_wait_s = queue_wait_s
        self._placing: set[asyncio.Timeout] = set()
        self._shutdown: ServiceError | None = None

    def stop(self, error: ServiceError) -> None:
        """Fail all requests that wait for a placement, and all later ones, with an error."""
        self._shutdown = error
        while self._placing:
            self._placing.pop().reschedule(0)  # now

    async def place(
        self,
        request: GenerationRequest,
        siblings: Siblings,
        retries: Retries,
        parent: Span,
        *,
        replayed: int,
    ) -> RoutedPlacement | None:
        """Place an attempt, in a span of its own. The caller must enter the result at once.

        Args:
            replayed: number of output tokens that the attempt replays.

        Returns:
            The placement; None if the output can end, because no worker has space for more.

        Raises:
            ServiceError: if the request cannot be placed, or `stop` was called.
        """
        with parent.child("route", Kind.CLIENT, {"headrace.attempt": retries.number}) as span:

            def call(wait_s: float) -> Awaitable[RoutedPlacement]:
                message = self._message(request, siblings.admitted, retries, replayed, wait_s)
                return self._router.place(message, span.headers, request.prefix)

            try:
                return await self._in_turn(call, siblings, retries, request.context.deadline)
            except ExceedsWorkers:
                if request.required_tokens is None or replayed < request.required_tokens:
                    raise
                return None

    async def place_inputs(
        self,
        context: RequestContext,
        message: EncodePlaceRequest,
        siblings: Siblings,
        retries: Retries,
        parent: Span,
    ) -> RoutedEncode:
        """Place an attempt at encoding inputs, as `place`.

        Args:
            message: the placement request, without what depends on the attempt.
        """
        with parent.child("route", Kind.CLIENT, {"headrace.attempt": retries.number}) as span:

            def call(wait_s: float) -> Awaitable[RoutedEncode]:
                of_attempt = message.model_copy(
                    update={
                        "admitted": siblings.admitted,
                        "attempt": retries.number,
                        "exclude": sorted(retries.excluded),
                        "wait_s": wait_s,
                    }
                )
                return self._router.place_inputs(of_attempt, span.headers)

            return await self._in_turn(call, siblings, retries, context.deadline)

    async def _in_turn(
        self,
        call: Callable[[float], Awaitable[R]],
        siblings: Siblings,
        retries: Retries,
        deadline: float,
    ) -> R:
        """Place an attempt when it is its turn among its siblings.

        Args:
            call: calls the routers, given the maximum time in a queue in seconds.

        Raises:
            ServiceError: as `place`.
        """
        if self._shutdown is not None:
            raise self._shutdown
        try:
            async with asyncio.timeout(None) as scope:
                self._placing.add(scope)
                # A retry was admitted with its first attempt, and does not wait for the others.
                async with nullcontext() if retries.number else siblings.turn:
                    routed = await self._repeat(call, siblings, retries, deadline)
                    siblings.admitted = True
                    return routed
        except TimeoutError:
            if self._shutdown is None or not scope.expired():
                raise
            raise self._shutdown from None
        finally:
            self._placing.discard(scope)

    async def _repeat(
        self,
        call: Callable[[float], Awaitable[R]],
        siblings: Siblings,
        retries: Retries,
        deadline: float,
    ) -> R:
        """Place an attempt. Workers that failed this request are used only as a last resort.

        A request waits while no router is reachable, and while workers register with a router that
        has just started. If a worker has already begun it, it also waits for workers to be ready. A
        further prompt of a request waits for capacity until the deadline, because a refusal would
        discard what was computed for the others.
        """
        began = time.monotonic()
        is_further = siblings.admitted and not retries.number
        until = deadline if is_further else min(began + self._queue_wait_s, deadline)
        tries = 0
        while True:
            try:
                routed = await call(min(max(0.0, until - time.monotonic()), MAX_WAIT_S))
            except (Overloaded, QueueTimeout, TooLarge, Unavailable) as error:
                is_full = isinstance(error, Overloaded | QueueTimeout)
                if retries.excluded and not (is_full or isinstance(error, NoRouter)):
                    retries.excluded.clear()
                elif (
                    _waits(error, retries) or (is_further and is_full)
                ) and time.monotonic() < until:
                    tries += 1
                    await asyncio.sleep(min(backoff_s(tries), until - time.monotonic()))
                else:
                    raise
            else:
                self._metrics.stages.labels("route").observe(time.monotonic() - began)
                return routed

    def _message(
        self,
        request: GenerationRequest,
        admitted: bool,
        retries: Retries,
        replayed: int,
        wait_s: float,
    ) -> PlaceRequest:
        context, required = request.context, request.required_tokens
        return PlaceRequest(
            request_id=context.request_id,
            admitted=admitted,
            attempt=retries.number,
            model=self._model,
            prompt_tokens=request.prompt_tokens + replayed,
            replayed_tokens=replayed,
            max_tokens=request.max_tokens - replayed,
            required_tokens=required and max(1, required - replayed),
            choices=request.options.n,
            tenant=context.tenant.id if context.tenant else None,
            weight=context.tenant.weight if context.tenant else 1,
            priority=-request.priority,  # routers place larger values first
            exclude=sorted(retries.excluded),
            wait_s=wait_s,
        )


def _waits(refusal: ServiceError, retries: Retries) -> bool:
    """Return whether to repeat a refused placement request."""
    if retries.number > 0:
        return not isinstance(refusal, TooLarge | QueueTimeout)
    return isinstance(refusal, NoRouter)
