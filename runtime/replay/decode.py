"""Decode without a word from the host: a step's tensors stay, and a CUDA graph replays it.

A sequence has a row of them for as long as it runs. A step feeds itself: the token drawn is the
next one's input, positions count up on the device. So a step can be launched before anybody has
read what the last one drew: `launch` writes what has changed, a row when a sequence joins, its page
table when it gets a page, and `collect` waits for the draws. A graph is captured for each bucket of
rows and each kind of sampling in it, at first use or by `warm_up`; on the CPU the same step is
called.

A row whose draw needs the host (`StaticSampler.decided`) does not move: a step that was launched
meanwhile computes it once more, and the host finishes the draw of the latest step only, whose
logits are still there.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.core.request import MOST_LOGPROBS
from runtime.core.sequence import Sequence as Running
from runtime.graphs.capture import capture
from runtime.graphs.host_copy import Landing
from runtime.kv.cache import PagedCache
from runtime.kv.pages import pages_for
from runtime.models.model import Model
from runtime.replay.slots import Rows
from runtime.sampling.on_device import EVERYTHING, Needs, StaticSampler
from runtime.sampling.reference import Draw, SamplingRow

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of graphs; and so on, half as many more."""
KINDS = (
    Needs(draws=False, shapes=False, logprobs=False),
    Needs(draws=True, shapes=False, logprobs=False),
    EVERYTHING,
)
"""Kinds of sampling that graphs are captured for: greedy, drawn without reshaping, and all else."""
UNDECIDED = Draw(-1)
"""The next step, which is launched already, draws this token again."""


@dataclass(frozen=True)
class Seating:
    """Who sits in which row of a step; the next one's is often the same."""

    sequences: list[Running]
    rows: list[int]
    bucket: int
    needs: Needs


@dataclass(frozen=True)
class Flight:
    """A step that was launched, and whose draws are on their way to the host."""

    replay: "DecodeReplay"
    seating: Seating
    landing: Landing

    @property
    def sequences(self) -> list[Running]:
        return self.seating.sequences


class DecodeReplay:
    """Decode steps of one model over one cache, for up to ``most`` sequences.

    The cache's last page must be nobody's: rows without a sequence write there. Raises ValueError
    for a model whose attention looks at lengths on the host, which no graph can hold. With
    ``by_layer`` a step is a graph for each layer, as FlashSVD v1.5 has it, and never one launch.
    """

    def __init__(
        self, model: Model, cache: PagedCache, most: int, *, by_layer: bool = False
    ) -> None:
        if model.device.type == "cuda" and not model.kv_format.graph_safe:
            raise ValueError(f"attention by {model.kv_format.kernels} cannot be replayed")
        self._model, self._cache, self._by_layer = model, cache, by_layer
        device, pages = model.device, len(cache.planes[0])
        buckets = list(BUCKETS)
        while buckets[-1] < most:
            buckets.append(buckets[-1] * 3 // 2)
        self._buckets = [bucket for bucket in buckets if bucket < most] + [most]
        width = pages_for(model.context_length, model.page_size)
        self._rows = Rows(most, width, pages - 1, device)
        self._order = torch.arange(most + 1, device=device)
        vocab = model.config.vocab_size
        sampler = self._sampler = StaticSampler(most, vocab, device, top=MOST_LOGPROBS)
        self._logits = torch.zeros(most, vocab, dtype=torch.float32, device=device)
        self._results = [
            sampler.drawn, sampler.logprobs, sampler.top_logprobs, sampler.top_tokens
        ]  # fmt: skip
        self._landings = cycle(Landing(self._results) for _ in range(2))
        self._steps: dict[tuple[int, Needs], Callable[[], object]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._seating = Seating([], [], 0, Needs.of([]))
        self._latest: Flight | None = None

    def follows(self, sequences: list[Running]) -> bool:
        """Whether a step of these may be launched before the last one's draws are known.

        It may not where rows would better move forward first: to move they have to be written.
        """
        least = self._bucket_of(len(sequences))
        if sequences == self._seating.sequences:
            return self._seating.bucket <= least
        return self._bucket_of(self._rows.last(sequences)) <= least

    def launch(self, sequences: list[Running]) -> Flight:
        """Start a step that draws the next token of each sequence.

        A sequence with a token that is not known yet must have been in the step before.
        """
        seating = self._seating
        if sequences != seating.sequences or seating.bucket > self._bucket_of(len(sequences)):
            seating = self._seating = self._seat(sequences)
        if joined := self._rows.write(sequences):
            self._sampler.load(
                list(joined), [SamplingRow.of(sequence) for sequence in joined.values()]
            )
        self._run(seating.bucket, seating.needs)
        self._latest = Flight(self, seating, next(self._landings))
        self._send(self._latest)
        return self._latest

    def collect(self, flight: Flight) -> list[Draw | None]:
        """Wait for a step's tokens; at most one may have been launched after it.

        Returns:
            For each sequence its draw, None where its logits are not finite, or `UNDECIDED`.
        """
        seating = flight.seating
        results = flight.landing.wait()
        found = results[0][: seating.bucket].tolist()
        missing = [row for row in seating.rows if found[row][1] and not found[row][2]]
        if missing and flight is self._latest:
            self._sampler.redraw(self._logits, missing)
            self._rows.move(missing, self._sampler.tokens)
            self._send(flight)
            found = flight.landing.wait()[0][: seating.bucket].tolist()
        return self._draws(seating, found, results)

    def warm_up(self, captured: Callable[[int], None]) -> None:
        """Capture every bucket for every kind of sampling, the largest first: the others use its
        memory. For a start, while nobody has a row. ``captured`` is told of each bucket."""
        for bucket in reversed(self._buckets):
            for kind in KINDS:
                self._run(bucket, kind)
            captured(bucket)

    def _bucket_of(self, rows: int) -> int:
        return self._buckets[bisect_left(self._buckets, rows)]

    def _seat(self, sequences: list[Running]) -> Seating:
        rows = self._rows.seat(sequences, self._bucket_of(len(sequences)))
        needs = Needs.of(sequence.request.sampling for sequence in sequences)
        needs = needs if needs in KINDS else EVERYTHING
        return Seating(sequences, rows, self._bucket_of(max(rows) + 1), needs)

    def _run(self, bucket: int, needs: Needs) -> None:
        key = bucket, needs
        if key not in self._steps:
            self._steps[key] = self._captured(bucket, needs)
        self._steps[key]()

    def _captured(self, bucket: int, needs: Needs) -> Callable[[], object]:
        """A step as graphs. What is run to prepare them is undone."""
        parts = self._parts(bucket, needs)

        def run() -> None:
            for part in parts:
                part()

        if self._model.device.type != "cuda":
            return run
        state = [self._rows.state, *self._sampler.state]
        kept = [tensor.clone() for tensor in state]
        run()
        for tensor, was in zip(state, kept, strict=True):
            tensor.copy_(was)
        if not self._by_layer:
            return capture(run, self._pool)
        parts = [capture(part, self._pool) for part in parts]
        return run

    def _parts(self, bucket: int, needs: Needs) -> Sequence[Callable[[], object]]:
        """A step in parts, of which each is called once, in their order."""
        rows, own = slice(bucket), self._rows
        batch = self._batch(bucket)
        if self._by_layer:
            *stages, logits_of = self._model.stages(batch, self._cache)
        else:
            stages, logits_of = [], self._model.static_step(batch, self._cache)
        return [
            lambda: torch.add(own.positions[rows], 1, out=own.lengths[rows]),
            *stages,
            lambda: self._draw(bucket, needs, logits_of()),
        ]

    def _batch(self, bucket: int) -> Batch:
        """The first rows, as tensors that stay."""
        rows, own = slice(bucket), self._rows
        return Batch(
            tokens=own.tokens[rows],
            positions=own.positions[rows],
            page_table=own.page_table[rows],
            starts=self._order[: bucket + 1].int(),
            lengths=own.lengths[rows],
            sequences=self._order[rows].int(),
            logit_rows=self._order[rows],
            single=True,
        )

    def _draw(self, bucket: int, needs: Needs, logits: Tensor) -> None:
        rows, own, sampler = slice(bucket), self._rows, self._sampler
        if needs.draws:
            self._logits[rows] = logits
        sampler(logits, needs)
        moved = own.active[rows] * sampler.decided[rows]
        own.tokens[rows] = torch.where(moved > 0, sampler.tokens[rows], own.tokens[rows])
        own.positions[rows] += moved

    def _send(self, flight: Flight) -> None:
        seating = flight.seating
        flight.landing.send(self._results[: None if seating.needs.logprobs else 1], seating.bucket)

    def _draws(
        self, seating: Seating, found: list[list[int]], results: list[Tensor]
    ) -> list[Draw | None]:
        draws: list[Draw | None] = []
        for sequence, row in zip(seating.sequences, seating.rows, strict=True):
            token, finite, decided = found[row]
            wanted = sequence.request.sampling.logprobs
            if not finite:
                draws.append(None)
            elif not decided:
                self._rows.stood_still(sequence)
                draws.append(UNDECIDED)
            elif wanted is None:
                draws.append(Draw(token))
            else:
                own, values, tokens = (result[row].tolist() for result in results[1:])
                top = tuple(zip(tokens[:wanted], values[:wanted], strict=True))
                draws.append(Draw(token, own[0], top))
        return draws
