"""Step plans as words: the changes of sequences since the plan before.

`PlanEncoder` keeps what it has sent of each sequence, and `PlanDecoder` a copy of the sequence, by
`SequenceState.arrival`. They process the same plans in the same order. Most sequences of a plan
have only gained one token: they take two words. The others are described by their changes:

- The known tokens of a sequence, those in ``tokens`` and then in ``forced``, only grow. New ones
  are sent with the number of those in ``tokens``.
- Page tables only grow, or entries before the window become `FREED`, in ascending order. They are
  sent as a whole if tokens were evicted, or if `SequenceState.page_tables` is another list, because
  the sequence had to release its pages.

Sequences that are in no plan any more are dropped. If one returns, it is sent as a new one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from runtime.core.plan import Chunk, StepPlan
from runtime.core.request import Request
from runtime.core.sequence import FREED, Purpose, SequenceGroup, SequenceState
from runtime.engine.plan_fields import (
    CHANGING,
    CONSTANT,
    WordReader,
    add_items,
    add_sampling,
    read_sampling,
)
from runtime.pages.groups import Part
from runtime.pages.plan import PagePlan

_PURPOSES = list(Purpose)
_NONE = -1
"""In place of the new token of a sequence whose changes are described, of the index of the request
of a sequence that the decoder has, of the next length of one with forced tokens, and of a group."""
_FREED_PAGE = [FREED]


@dataclass(slots=True)
class _Sent:
    """State of a sequence in the decoder, as the encoder has sent it.

    Attributes:
        group: arrival of the group of its last chunk.
        known: number of known tokens.
        next_length: length in tokens once it has gained one token; none if it has forced tokens.
        tables: the list of page tables that was sent. Only its identity is used.
        entries: number of entries of each page table.
        freed: for each page table, index after its `FREED` entries, which directly follow the
            sinks; used only for groups of `Part.ENDS`.
    """

    known: int
    group: int = _NONE
    next_length: int = _NONE
    evicted: int = 0
    lookahead: int = 0
    tables: list[list[int]] | None = None
    entries: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)


class PlanEncoder:
    """Encodes consecutive step plans.

    Args:
        plan: page groups of the sequences.
    """

    def __init__(self, plan: PagePlan) -> None:
        self._sinks = [group.sink_pages for group in plan.groups]
        self._windows = [at for at, group in enumerate(plan.groups) if group.part is Part.ENDS]
        self._sent: dict[int, _Sent] = {}

    def encode(self, plan: StepPlan) -> list[int]:
        """Return the words of a plan. The sequences must not change until it is launched."""
        words: list[int] = []
        self._drop(words, plan)
        add_items(words, [sequence.arrival for sequence in plan.decode])
        tokens = list(map(self._new_token, plan.decode))
        words += tokens
        described = [
            sequence for sequence, token in zip(plan.decode, tokens, strict=True) if token == _NONE
        ]
        words.append(len(plan.chunks))
        for chunk in plan.chunks:
            _add_chunk(words, chunk)
            described += chunk.group.sequences
        self._describe(words, described)
        for chunk in plan.chunks:
            for sequence in chunk.group.sequences:
                self._sent[sequence.arrival].group = chunk.group.arrival
        add_items(words, plan.prefilling)
        return words

    def _drop(self, words: list[int], plan: StepPlan) -> None:
        """Forget the sequences that neither this plan nor a later chunk of their prompt needs."""
        chunks = (chunk.group.sequences for chunk in plan.chunks)
        needed = {sequence.arrival for sequence in chain(plan.decode, *chunks)}
        dropped = [
            arrival
            for arrival in self._sent.keys() - needed
            if self._sent[arrival].group not in plan.prefilling
        ]
        for arrival in dropped:
            del self._sent[arrival]
        add_items(words, dropped)

    def _new_token(self, sequence: SequenceState) -> int:
        """Return the token that a sequence has gained, if nothing else of it has changed.

        It is fast, because it is called in every step for the whole batch.
        """
        sent = self._sent.get(sequence.arrival)
        if (
            sent is None
            or len(sequence.tokens) != sent.next_length
            or sequence.forced
            or sequence.lookahead != sent.lookahead
            or sequence.evicted != sent.evicted
            or (tables := sequence.page_tables) is not sent.tables
            or list(map(len, tables)) != sent.entries
            or (self._windows and self._has_left(tables, sent))
        ):
            return _NONE
        sent.known += 1
        sent.next_length += 1
        return sequence.tokens[-1]

    def _has_left(self, tables: list[list[int]], sent: _Sent) -> bool:
        """Return whether a page has left the window of its group."""
        for at in self._windows:
            first = sent.freed[at]
            if tables[at][first : first + 1] == _FREED_PAGE:
                return True
        return False

    def _describe(self, words: list[int], sequences: list[SequenceState]) -> None:
        """Append the requests of new sequences, then the changes of all of these sequences.

        New sequences start with the tokens of their request. Choices of one request share it.
        """
        requests: list[Request] = []
        changes: list[int] = []
        for sequence in sequences:
            changes.append(sequence.arrival)
            sent = self._sent.get(sequence.arrival)
            if sent is None:
                if not requests or requests[-1] is not sequence.request:
                    requests.append(sequence.request)
                changes.append(len(requests) - 1)
                changes += [getattr(sequence, name) for name in CONSTANT]
                sent = self._sent[sequence.arrival] = _Sent(len(sequence.request.tokens))
            else:
                changes.append(_NONE)
            self._add_tables(changes, sequence, sent)
            self._add_tokens(changes, sequence, sent)
            changes += [getattr(sequence, name) for name in CHANGING]
            sent.evicted = sequence.evicted
            sent.lookahead = sequence.lookahead
        words.append(len(requests))
        for request in requests:
            _add_request(words, request)
        words.append(len(sequences))
        words += changes

    def _add_tokens(self, words: list[int], sequence: SequenceState, sent: _Sent) -> None:
        """Append the number of tokens that are not forced, and the new known tokens."""
        length = len(sequence.tokens)
        words.append(length)
        if sent.known <= length:
            add_items(words, chain(sequence.tokens[sent.known :], sequence.forced))
        else:
            add_items(words, islice(sequence.forced, sent.known - length, None))
        sent.known = sequence.known
        sent.next_length = _NONE if sequence.forced else length + 1

    def _add_tables(self, words: list[int], sequence: SequenceState, sent: _Sent) -> None:
        """Append the changes of each page table.

        They are the number of entries that stay, the range of those that have become `FREED`, and
        the new entries. For example, if the window of a table [7, 8, 9] has moved by one page, to
        [FREED, 8, 9, 4], three entries stay, the range is 0 to 1, and the new entries are [4].
        """
        tables = sequence.page_tables
        if tables is not sent.tables or sequence.evicted != sent.evicted:
            sent.tables = tables
            sent.entries = [0] * len(tables)
            sent.freed = self._sinks[: len(tables)]
        words.append(len(tables))
        for at, table in enumerate(tables):
            first = end = sent.freed[at]
            if at in self._windows:
                while end < len(table) and table[end] == FREED:
                    end += 1
            kept = sent.entries[at]
            words += kept, first, end
            add_items(words, table[kept:])
            sent.entries[at] = len(table)
            sent.freed[at] = end


class PlanDecoder:
    """Decodes the words of a `PlanEncoder` into copies of its plans.

    The fields in `runtime.engine.plan_fields.NOT_READ` have other values. Copies of sequences
    change when the next plan is decoded.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        """Return the number of copies of sequences."""
        return len(self._sequences)

    def decode(self, reader: WordReader) -> StepPlan:
        """Return the next plan."""
        sequences = self._sequences
        for arrival in reader.items():
            del sequences[arrival]
        decode = reader.items()
        for arrival, token in zip(decode, reader.take(len(decode)), strict=True):
            if token != _NONE:
                sequences[arrival].tokens.append(token)
        chunks = [_ChunkWords.read(reader) for _ in range(reader.word())]
        requests = [_read_request(reader) for _ in range(reader.word())]
        for _ in range(reader.word()):
            arrival, request = reader.take(2)
            if request != _NONE:
                sequences[arrival] = _new_sequence(*requests[request], arrival, reader)
            _change(sequences[arrival], reader)
        return StepPlan(
            chunks=[chunk.of(sequences) for chunk in chunks],
            decode=[sequences[arrival] for arrival in decode],
            reserved=[],
            deferred=[],
            refused=[],
            prefilling=frozenset(reader.items()),
        )


def _new_sequence(
    request: Request, tokens: list[int], arrival: int, reader: WordReader
) -> SequenceState:
    """Return a sequence that starts with the tokens of its request."""
    sequence = SequenceState(request, 0, arrival, [*tokens], limit=0)
    _set(sequence, CONSTANT, reader)
    return sequence


def _set(sequence: SequenceState, names: Sequence[str], reader: WordReader) -> None:
    for name, value in zip(names, reader.take(len(names)), strict=True):
        setattr(sequence, name, value)


def _change(sequence: SequenceState, reader: WordReader) -> None:
    """Apply the changes of a sequence."""
    tables = sequence.page_tables
    count = reader.word()
    del tables[count:]
    tables += [[] for _ in range(count - len(tables))]
    for table in tables:
        kept, first, end = reader.take(3)
        table[kept:] = reader.items()
        table[first:end] = [FREED] * (end - first)
    length = reader.word()
    sequence.forced.extend(reader.items())
    if length < len(sequence.tokens):
        sequence.rewind(length)
    while len(sequence.tokens) < length:
        sequence.tokens.append(sequence.forced.popleft())
    _set(sequence, CHANGING, reader)


def _add_request(words: list[int], request: Request) -> None:
    words.append(request.prompt_tokens)
    add_sampling(words, request.sampling)
    add_items(words, request.tokens)


def _read_request(reader: WordReader) -> tuple[Request, list[int]]:
    """Return a copy of a request without its tokens, and its tokens."""
    prompt_tokens = reader.word()
    sampling = read_sampling(reader)
    return Request("", (), prompt_tokens, sampling, max_tokens=0), reader.items()


def _add_chunk(words: list[int], chunk: Chunk) -> None:
    words += [
        _PURPOSES.index(chunk.group.purpose),
        chunk.first,
        chunk.count,
        chunk.vacated.start,
        chunk.vacated.stop,
        chunk.scored.start,
        chunk.scored.stop,
    ]
    add_items(words, [sequence.arrival for sequence in chunk.group.sequences])


@dataclass(frozen=True)
class _ChunkWords:
    """A chunk whose sequences are known by their arrivals."""

    purpose: Purpose
    first: int
    count: int
    vacated: range
    scored: range
    arrivals: list[int]

    @classmethod
    def read(cls, reader: WordReader) -> "_ChunkWords":
        purpose, first, count, *ranges = reader.take(7)
        vacated, scored = range(*ranges[:2]), range(*ranges[2:])
        return cls(_PURPOSES[purpose], first, count, vacated, scored, reader.items())

    def of(self, sequences: dict[int, SequenceState]) -> Chunk:
        """Return the chunk."""
        group = SequenceGroup(self.purpose, [sequences[arrival] for arrival in self.arrivals])
        return Chunk(group, self.first, self.count, self.vacated, self.scored)
