"""Host time to send a step to other ranks: ``python -m runtime.offline.bench channel --help``.

Every sequence gains a token in each step, and one in sixteen a page. All ranks are in one process,
one after the other, so that no time is spent on waking up. The first rank encodes the plan and
writes it before its own launch; a follower reads and decodes it before it launches.
"""

import argparse
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from runtime.core.plan import StepPlan
from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import Purpose, SequenceGroup, SequenceState
from runtime.engine.plan_deltas import PlanDecoder, PlanEncoder
from runtime.engine.plan_fields import WordReader
from runtime.engine.ring import RingSize, RingWriter
from runtime.pages.plan import PAGE_SIZE, PagePlan, pages_for

LIMIT = 1 << 20
"""Maximum length of the sequences."""


@dataclass(frozen=True)
class Figure:
    """Median times of a step in microseconds.

    Attributes:
        encode, write: on the first rank.
        read, decode: on each follower.
    """

    encode: float
    write: float
    read: float
    decode: float


def figure(sequences: int, tokens: int, followers: int, runs: int) -> Figure:
    """Measure a batch of sequences whose prompts have ``tokens`` tokens."""
    batch = [_sequence(arrival, tokens) for arrival in range(sequences)]
    encoder, decoder = PlanEncoder(PagePlan(PAGE_SIZE)), PlanDecoder()
    ring = RingWriter(followers, timeout_s=0, size=RingSize())
    now = time.perf_counter
    rows = []
    for step in range(1 + runs):
        plan = StepPlan([], batch, [], [], [], frozenset())
        times = [now()]
        words = encoder.encode(plan)
        times.append(now())
        ring.write(words)
        times.append(now())
        message, *_ = [reader.read() for reader in ring.readers]
        times.append(now())
        assert message is not None
        decoder.decode(WordReader(message.tolist()))
        times.append(now())
        encode, write, read, decode = (1e6 * (end - start) for start, end in pairwise(times))
        rows.append((encode, write, read / followers, decode))
        for sequence in batch:
            sequence.tokens.append(step)
            if (sequence.arrival + step) % PAGE_SIZE == 0:
                sequence.page_tables[0].append(step)
    return Figure(*map(median, zip(*rows[1:], strict=True)))


def _sequence(arrival: int, tokens: int) -> SequenceState:
    request = Request(str(arrival), (1,) * tokens, tokens, SamplingParams(), LIMIT)
    group = SequenceGroup.of(request, Purpose.GENERATE, arrival, limit=LIMIT, evicts=0)
    [sequence] = group.sequences
    sequence.page_tables = [[*range(pages_for(tokens, PAGE_SIZE))]]
    return sequence


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.offline.bench channel")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=512, help="length of the prompts")
    parser.add_argument("--followers", type=int, default=3)
    parser.add_argument("--runs", type=int, default=300, help="timed steps")
    args = parser.parse_args()
    print(f"microseconds; {args.followers} followers, prompts of {args.tokens} tokens")
    print(f"{'sequences':>9} {'encode':>8} {'write':>8} {'read':>8} {'decode':>8}")
    for sequences in args.sequences:
        found = figure(sequences, args.tokens, args.followers, args.runs)
        times = (found.encode, found.write, found.read, found.decode)
        print(f"{sequences:9}", *(f"{microseconds:8.0f}" for microseconds in times))


if __name__ == "__main__":
    main()
