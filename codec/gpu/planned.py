"""`paged.PagedCodec` on a GPU: plans are kept, and nothing waits for what was launched."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

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
from codec.gpu.backend import books_of, check
from codec.gpu.plan import Facts, Plan, Workspace, event_now
from codec.mix import MASK64
from codec.ops import Decoded, Encoded, raw_bytes

T = TypeVar("T")

_KEPT = 16
"""Plans of one `PlannedCodec`. Segments are of a few lengths, but for the last one of a prompt."""


@dataclass(frozen=True)
class Launched(Generic[T]):
    """A `paged.Pending` whose facts are on their way."""

    facts: Facts
    begun: torch.cuda.Event | None
    finish: Callable[[tuple[int, int, int, int]], T]

    @property
    def done(self) -> bool:
        event = self.facts.event
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        if self.begun is None or self.facts.event is None:
            return 0.0
        return float(self.begun.elapsed_time(self.facts.event)) / 1e3

    def result(self) -> T:
        return self.finish(self.facts.read())


class PlannedCodec:
    """See `paged.paged`; a segment of these planes has tokens."""

    def __init__(self, planes: Sequence[Tensor], codebooks: Sequence[Codebook | None]) -> None:
        self._planes, self._codebooks = tuple(planes), tuple(codebooks)
        self._element, self._empty = check_planes(planes, codebooks, 0)
        self._workspace = _workspace_of(planes[0].device)
        self._plans: OrderedDict[tuple[int, tuple[bool, ...]], tuple[Plan, Layout]] = OrderedDict()

    def encode(self, page_ids: PageIds, num_tokens: int, out: Tensor) -> Launched[Encoded]:
        """See `paged.PagedCodec`."""
        geometry, pages = self._placed(page_ids, num_tokens)
        check_bytes(out, self._planes[0].device)
        plan, layout = self._plan(geometry, self._codebooks)
        check_output(out, layout)
        begun = event_now() if out.is_cuda else None
        with self._forgotten_if_it_fails():
            plan.encode(pages, out)
            facts = plan.facts()
        raw = raw_bytes(self._planes, geometry)

        def finish(found: tuple[int, int, int, int]) -> Encoded:
            length, checksum, escapes, _ = found
            return Encoded(length, raw, escapes, checksum & MASK64)

        return Launched(facts, begun, finish)

    def decode(
        self, payload: Tensor, header: SegmentHeader, page_ids: PageIds, num_tokens: int
    ) -> Launched[Decoded]:
        """See `paged.PagedCodec`."""
        geometry, pages = self._placed(page_ids, num_tokens)
        check_bytes(payload, self._planes[0].device)
        check_header(header, len(payload), self._element, geometry, self._codebooks)
        plan, _ = self._plan(geometry, books_of(header, self._codebooks))
        begun = event_now() if payload.is_cuda else None
        with self._forgotten_if_it_fails():
            plan.decode(pages, payload)
            facts = plan.facts()
        raw = raw_bytes(self._planes, geometry)

        def finish(found: tuple[int, int, int, int]) -> Decoded:
            _, checksum, _, errors = found
            check(errors)
            check_checksum(checksum & MASK64, header)
            return Decoded(header.length, raw, header.checksum)

        return Launched(facts, begun, finish)

    @contextmanager
    def _forgotten_if_it_fails(self) -> Iterator[None]:
        """What a launch that broke off has summed up must not be another segment's."""
        try:
            yield
        except BaseException:
            self._plans.clear()
            raise

    def _placed(self, page_ids: PageIds, num_tokens: int) -> tuple[Geometry, Tensor]:
        if num_tokens < 1:
            raise InvalidPages(f"{num_tokens} tokens")
        geometry = replace(self._empty, num_tokens=num_tokens)
        return geometry, check_pages(page_ids, len(self._planes[0]), geometry)

    def _plan(
        self, geometry: Geometry, codebooks: Sequence[Codebook | None]
    ) -> tuple[Plan, Layout]:
        key = geometry.num_tokens, tuple(book is None for book in codebooks)
        if key not in self._plans:
            modes = [Mode.RAW if book is None else book.mode for book in codebooks]
            layout = Layout.of(geometry, self._element, modes)
            plan = Plan(self._planes, codebooks, geometry, layout, workspace=self._workspace)
            self._plans[key] = plan, layout
        self._plans.move_to_end(key)
        if len(self._plans) > _KEPT:
            self._plans.popitem(last=False)
        return self._plans[key]


_workspaces: dict[torch.device, Workspace] = {}


def _workspace_of(device: torch.device) -> Workspace:
    """One for all codecs of a device: their encodes follow one another on one stream."""
    return _workspaces.setdefault(device, Workspace(device))
