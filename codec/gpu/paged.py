"""Asynchronous paged codec on a GPU. It caches launch plans; its calls do not wait for kernels."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from codec.backend import Decoded, Encoded, raw_bytes
from codec.checks import (
    PageIds,
    check_bytes,
    check_checksum,
    check_header,
    check_output,
    check_pages,
    check_planes,
)
from codec.codebook import Codebook
from codec.errors import InvalidPages
from codec.format import Geometry, Layout, Mode, SegmentHeader
from codec.gpu.backend import check_errors
from codec.gpu.groups import used_codebooks
from codec.gpu.plan import LaunchPlan, Results, Workspace, record_event
from codec.mix import MASK64

T = TypeVar("T")

_MAX_PLANS = 16
"""Maximum number of launch plans in the cache of a `PagedCodec`. Each combination of segment length
and raw planes needs its own plan.
"""


@dataclass(frozen=True)
class PendingLaunch(Generic[T]):
    """A `codec.backend.Pending` result of launched kernels."""

    results: Results
    started: torch.cuda.Event | None
    finish: Callable[[tuple[int, int, int, int]], T]

    @property
    def done(self) -> bool:
        event = self.results.event
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        if self.started is None or self.results.event is None:
            return 0.0
        return float(self.started.elapsed_time(self.results.event)) / 1e3

    def result(self) -> T:
        return self.finish(self.results.read())


class PagedCodec:
    """A `codec.backend.PagedCodec` for one GPU. Its segments have at least one token."""

    def __init__(self, planes: Sequence[Tensor], codebooks: Sequence[Codebook | None]) -> None:
        self._planes, self._codebooks = tuple(planes), tuple(codebooks)
        self._element, self._empty = check_planes(planes, codebooks, 0)
        self._workspace = _workspace_of(planes[0].device)
        self._plans: OrderedDict[tuple[int, tuple[bool, ...]], tuple[LaunchPlan, Layout]] = (
            OrderedDict()
        )

    def encode(self, page_ids: PageIds, num_tokens: int, out: Tensor) -> PendingLaunch[Encoded]:
        """See `codec.backend.PagedCodec`."""
        geometry, pages = self._geometry_and_pages(page_ids, num_tokens)
        check_bytes(out, self._planes[0].device)
        plan, layout = self._plan(geometry, self._codebooks)
        check_output(out, layout)
        started = record_event() if out.is_cuda else None
        with self._discard_plans_on_failure():
            plan.encode(pages, out)
            results = plan.results()
        raw = raw_bytes(self._planes, geometry)

        def finish(found: tuple[int, int, int, int]) -> Encoded:
            length, checksum, escapes, _ = found
            return Encoded(length, raw, escapes, checksum & MASK64)

        return PendingLaunch(results, started, finish)

    def decode(
        self, payload: Tensor, header: SegmentHeader, page_ids: PageIds, num_tokens: int
    ) -> PendingLaunch[Decoded]:
        """See `codec.backend.PagedCodec`."""
        geometry, pages = self._geometry_and_pages(page_ids, num_tokens)
        check_bytes(payload, self._planes[0].device)
        check_header(header, len(payload), self._element, geometry, self._codebooks)
        plan, _ = self._plan(geometry, used_codebooks(header, self._codebooks))
        started = record_event() if payload.is_cuda else None
        with self._discard_plans_on_failure():
            plan.decode(pages, payload)
            results = plan.results()
        raw = raw_bytes(self._planes, geometry)

        def finish(found: tuple[int, int, int, int]) -> Decoded:
            _, checksum, _, errors = found
            check_errors(errors)
            check_checksum(checksum & MASK64, header)
            return Decoded(header.length, raw, header.checksum)

        return PendingLaunch(results, started, finish)

    @contextmanager
    def _discard_plans_on_failure(self) -> Iterator[None]:
        """Discard all plans if a launch fails, because their accumulators may not be zero."""
        try:
            yield
        except BaseException:
            self._plans.clear()
            raise

    def _geometry_and_pages(self, page_ids: PageIds, num_tokens: int) -> tuple[Geometry, Tensor]:
        if num_tokens < 1:
            raise InvalidPages(f"a segment needs at least one token, not {num_tokens}")
        geometry = replace(self._empty, num_tokens=num_tokens)
        return geometry, check_pages(page_ids, len(self._planes[0]), geometry)

    def _plan(
        self, geometry: Geometry, codebooks: Sequence[Codebook | None]
    ) -> tuple[LaunchPlan, Layout]:
        key = geometry.num_tokens, tuple(book is None for book in codebooks)
        if key not in self._plans:
            modes = [Mode.RAW if book is None else book.mode for book in codebooks]
            layout = Layout.of(geometry, self._element, modes)
            plan = LaunchPlan(self._planes, codebooks, geometry, layout, workspace=self._workspace)
            self._plans[key] = plan, layout
        self._plans.move_to_end(key)
        if len(self._plans) > _MAX_PLANS:
            self._plans.popitem(last=False)
        return self._plans[key]


_workspaces: dict[torch.device, Workspace] = {}


def _workspace_of(device: torch.device) -> Workspace:
    """Return the scratch memory of a device.

    All codecs share it, because they encode on the same CUDA stream.
    """
    return _workspaces.setdefault(device, Workspace(device))
