"""Decode without a word from the host: a step's tensors stay, and a CUDA graph replays it.

A sequence has a row of them for as long as it runs. A step feeds itself: the token drawn is the
next one's input, positions and lengths count up on the device. The host writes a row when a
sequence joins, its page table when it gets a page, and reads what was drawn. A graph is captured
for each bucket of rows and each kind of sampling in it, at first use or by `warm_up`; on the CPU
the same step is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.captured import Captured
from runtime.kv.cache import PagedCache
from runtime.model import Model
from runtime.sampling import Draw, Row
from runtime.static_sampling import Needs, StaticSampler
from runtime.work import Sequence as Running

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOP = 20
"""Most probable tokens that are found beside each one; rows that ask for more are not replayed."""


@dataclass
class _Seat:
    """What a row's tensors hold of a sequence."""

    sequence: Running
    tokens: int
    pages: int


class DecodeReplay:
    """Decode steps of one model over one cache, for up to ``most`` sequences.

    The cache's last page must be nobody's: rows without a sequence write there. Raises ValueError
    for a model whose attention looks at lengths on the host, which no graph can hold.
    """

    def __init__(self, model: Model, cache: PagedCache, most: int) -> None:
        if model.device.type == "cuda" and "reference" in model.kv_format.kernels:
            raise ValueError(f"attention by {model.kv_format.kernels} cannot be replayed")
        self._model, self._cache = model, cache
        device, pages = model.device, len(cache.planes[0])
        self._buckets = [bucket for bucket in BUCKETS if bucket < most] + [most]
        self._seats: list[_Seat | None] = [None] * most
        self._nowhere = pages - 1
        width = -(-model.context_length // model.page_size)

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._tokens, self._positions, self._active = numbers(3, most)
        self._lengths = numbers(most, dtype=torch.int32) + 1
        self._page_table = numbers(most, width, dtype=torch.int32) + self._nowhere
        self._order = torch.arange(most + 1, device=device)
        self._sampler = StaticSampler(most, model.config.vocab_size, device, top=TOP)
        self._logits = numbers(most, model.config.vocab_size, dtype=torch.float32)
        self._steps: dict[tuple[int, Needs], Callable[[], object]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def takes(self, sequences: Sequence[Running]) -> bool:
        """Whether this batch can be replayed."""
        return len(sequences) <= len(self._seats) and all(
            (sequence.request.sampling.logprobs or 0) <= TOP for sequence in sequences
        )

    def step(self, sequences: Sequence[Running]) -> list[Draw | None]:
        """The next token of each sequence; None where its logits are not finite."""
        seats = self._seat(sequences)
        bucket = next(size for size in self._buckets if size > max(seats, default=0))
        needs = Needs.of(sequence.request.sampling for sequence in sequences)
        self._run(bucket, needs)
        for seat in seats:
            if (held := self._seats[seat]) is not None:
                held.tokens += 1
        return self._drawn(bucket, seats, sequences, needs)

    def warm_up(
        self, needs: Sequence[Needs], captured: Callable[[int], None] = lambda _bucket: None
    ) -> None:
        """Capture every bucket for these kinds of sampling, the largest first: the others use its
        memory. ``captured`` is told of each."""
        for bucket in reversed(self._buckets):
            for kind in needs:
                self._run(bucket, kind)
            captured(bucket)
        for row in range(len(self._seats)):
            self._leave(row)

    def _seat(self, sequences: Sequence[Running]) -> list[int]:
        """Give each sequence a row, those that have one the same, and write what has changed."""
        wanted = {id(sequence) for sequence in sequences}
        rows: dict[int, int] = {}
        for row, seat in enumerate(self._seats):
            if seat is not None and id(seat.sequence) in wanted:
                rows[id(seat.sequence)] = row
            elif seat is not None:
                self._leave(row)
        free = [row for row, seat in enumerate(self._seats) if seat is None]
        for sequence in sequences:
            if id(sequence) not in rows:
                rows[id(sequence)] = free.pop(0)
                self._join(rows[id(sequence)], sequence)
        self._close_up(rows, free)
        for sequence in sequences:
            row = rows[id(sequence)]
            seat = self._seats[row]
            if seat is None or seat.tokens != len(sequence.tokens):
                self._join(row, sequence)
            elif seat.pages != len(sequence.pages):
                self._write_pages(row, sequence, seat.pages)
                seat.pages = len(sequence.pages)
        return [rows[id(sequence)] for sequence in sequences]

    def _close_up(self, rows: dict[int, int], free: list[int]) -> None:
        """Move the last rows forward once they keep a batch in a larger bucket than it needs."""
        fits = next(size for size in self._buckets if size >= max(1, len(rows)))
        last = max(rows.values(), default=0)
        if next(size for size in self._buckets if size > last) == fits:
            return
        for row in sorted(rows.values(), reverse=True):
            target = min(free, default=row)
            if row < fits or target >= row:
                break
            seat = self._seats[row]
            if seat is not None:
                free.remove(target)
                rows[id(seat.sequence)] = target
                self._leave(row)
                self._join(target, seat.sequence)

    def _join(self, row: int, sequence: Running) -> None:
        tokens, request = sequence.tokens, sequence.request
        self._seats[row] = _Seat(sequence, len(tokens), len(sequence.pages))
        self._tokens[row] = tokens[-1]
        self._positions[row] = len(tokens) - 1
        self._lengths[row] = len(tokens)
        self._active[row] = 1
        self._write_pages(row, sequence, 0)
        own = Row(request.sampling, sequence.choice, tokens, request.prompt_tokens)
        self._sampler.load(row, own)

    def _leave(self, row: int) -> None:
        self._seats[row] = None
        self._tokens[row] = self._positions[row] = self._active[row] = 0
        self._lengths[row] = 1
        self._page_table[row, 0] = self._nowhere

    def _write_pages(self, row: int, sequence: Running, first: int) -> None:
        pages = torch.tensor(sequence.pages[first:], dtype=torch.int32)
        self._page_table[row, first : first + len(pages)] = pages.to(self._page_table.device)

    def _run(self, bucket: int, needs: Needs) -> None:
        key = bucket, needs
        if key not in self._steps:
            self._steps[key] = self._captured(bucket, needs)
        self._steps[key]()

    def _captured(self, bucket: int, needs: Needs) -> Callable[[], object]:
        """A step as a graph. What is run to prepare it is undone."""
        logits_of = self._model.static_step(self._batch(bucket), self._cache)

        def compute() -> None:
            self._compute(bucket, needs, logits_of)

        if self._model.device.type != "cuda":
            return compute
        state = [self._tokens, self._positions, self._lengths, *self._sampler.state]
        kept = [tensor.clone() for tensor in state]
        compute()
        for tensor, was in zip(state, kept, strict=True):
            tensor.copy_(was)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on asking the device meanwhile; graphs never run at the same time.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        return Captured(graph, compute)

    def _batch(self, bucket: int) -> Batch:
        """The first rows, as tensors that stay."""
        rows = slice(bucket)
        return Batch(
            tokens=self._tokens[rows],
            positions=self._positions[rows],
            page_table=self._page_table[rows],
            starts=self._order[: bucket + 1].int(),
            lengths=self._lengths[rows],
            sequences=self._order[rows].int(),
            logit_rows=self._order[rows],
            single=True,
        )

    def _compute(self, bucket: int, needs: Needs, logits_of: Callable[[], Tensor]) -> None:
        rows = slice(bucket)
        logits = logits_of()
        if needs.draws:
            self._logits[rows] = logits
        self._sampler(logits, needs)
        active = self._active[rows]
        self._tokens[rows] = torch.where(active > 0, self._sampler.tokens[rows], 0)
        self._positions[rows] += active
        self._lengths[rows] += active.int()

    def _drawn(
        self, bucket: int, seats: Sequence[int], sequences: Sequence[Running], needs: Needs
    ) -> list[Draw | None]:
        sampler, rows = self._sampler, slice(bucket)
        found = torch.stack(
            [sampler.tokens[rows], sampler.finite[rows].long(), sampler.decided[rows].long()]
        ).tolist()
        if not all(found[2][seat] for seat in seats):
            sampler.redraw(self._logits[rows])
            self._tokens[rows] = torch.where(self._active[rows] > 0, sampler.tokens[rows], 0)
            found[0] = sampler.tokens[rows].tolist()
        logprobs: list[list[float]] = []
        if needs.logprobs:
            logprobs = torch.cat(
                [sampler.logprobs[rows, None], sampler.top_logprobs[rows]], dim=1
            ).tolist()
            tops = sampler.top_tokens[rows].tolist()
        draws: list[Draw | None] = []
        for seat, sequence in zip(seats, sequences, strict=True):
            wanted = sequence.request.sampling.logprobs
            if not found[1][seat]:
                draws.append(None)
            elif wanted is None:
                draws.append(Draw(found[0][seat]))
            else:
                own, *values = logprobs[seat]
                top = tuple(zip(tops[seat][:wanted], values[:wanted], strict=True))
                draws.append(Draw(found[0][seat], own, top))
        return draws
