"""Compare the tokens of disaggregated deployments with those of a colocated one.

``python -m tests.programs.equality`` sends 50 prompts of 1 to 3,000 tokens to a colocated
deployment and to disaggregated ones, 8 at a time, and prints a table. Workers have one rank, then
several; by default, prefill workers have two and decode workers three (``--ranks 2+3``). A
difference is `close` if the reference's gap at that token (`gap_of`) is less than ``EPSILON``,
because another batch composition or number of ranks may round logits differently. Any other
difference is a failure.

On a GPU, use ``--concurrency 1``. With equal ranks, batches are then the same, and all tokens must
be equal.
"""

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from grpc import aio
from rich.console import Console
from rich.table import Table

from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from runtime.offline.compress import documentation
from runtime.sampling.reference import uniform
from services.common.model_source import DEFAULT_MODEL, resolve_model
from services.tokenizer.loading import load_tokenizer
from tests.harness.deployment import Running, deployed

if TYPE_CHECKING:  # defined in the type stubs only
    from headrace.v1.inference_pb2_grpc import InferenceAsyncStub

EPSILON = 0.08 if torch.cuda.is_available() else 0.05
"""Nats. Rounding in bf16, or in fp32 over bf16 KV, changes differences of two logits by less."""
TOP_K, TOP_P = 5, 0.95
"""Filters of sampled answers. Answers have the log probabilities of `TOP_K` + 1 tokens, which
include all that may be drawn."""
CONCURRENCY = 8


@dataclass(frozen=True)
class Case:
    """One request. The seed matters only if the temperature is not 0."""

    name: str
    prompt: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """Generated tokens, and the gap of each (`gap_of`), in nats."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Number of equal answers, and descriptions of close and of different ones."""

    equal: int
    close: tuple[str, ...]
    different: tuple[str, ...]


def make_cases(
    count: int, *, longest: int, max_tokens: int, seed: int = 7, model: str = DEFAULT_MODEL
) -> list[Case]:
    """Return cases of real text with 1 to ``longest`` tokens. Every second one uses sampling.

    Args:
        model: name or path of the model that has the tokenizer.
    """
    text = load_tokenizer(resolve_model(model)).encode(documentation()[1])
    rng = random.Random(seed)
    lengths = [1, longest, 16, 17, 255, 256, 257]
    lengths += [int(longest ** rng.uniform(0.2, 1.0)) for _ in range(max(0, count - len(lengths)))]
    cases = []
    for at, target in enumerate(lengths[:count]):
        length = min(target, longest)
        start = rng.randrange(len(text) - length)
        cases.append(
            Case(
                name=f"{at}: {length} tokens",
                prompt=tuple(text[start : start + length]),
                temperature=0.8 if at % 2 else 0.0,
                seed=rng.getrandbits(32),
                max_tokens=max_tokens,
            )
        )
    return cases


async def ask_all(
    running: Running, cases: Sequence[Case], concurrency: int = CONCURRENCY
) -> dict[str, Answer]:
    """Send all cases, ``concurrency`` at a time, and return the answers by case name."""
    limit = asyncio.Semaphore(concurrency)
    async with aio.insecure_channel(running.grpc_target) as channel:
        stub = InferenceStub(channel)

        async def ask(case: Case) -> Answer:
            async with limit:
                return await _ask(stub, case)

        answers = await asyncio.gather(*(ask(case) for case in cases))
    return {case.name: answer for case, answer in zip(cases, answers, strict=True)}


async def _ask(stub: "InferenceAsyncStub", case: Case) -> Answer:
    request = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=case.prompt),
        max_tokens=case.max_tokens,
        temperature=case.temperature,
        top_k=TOP_K,
        top_p=TOP_P,
        seed=case.seed,
        logprobs=TOP_K + 1,
    )
    tokens: list[int] = []
    gaps: list[float] = []
    async for response in stub.Generate(request):
        for token in response.tokens:
            top = sorted((top.logprob for top in token.top), reverse=True)
            gaps.append(gap_of(case, len(tokens), top))
            tokens.append(token.token)
    return Answer(tuple(tokens), tuple(gaps))


def gap_of(case: Case, index: int, top: Sequence[float]) -> float:
    """Return the smallest change of a difference of two logits that may change a token, in nats.

    A greedy token changes if the two best tokens swap. A sampled token changes if it swaps with a
    neighbour in the order of probability, or if a cumulative probability passes the random number
    or top-p. If differences of logits change by at most x, the log odds of a cumulative probability
    change by at most x / temperature.

    Args:
        index: output index of the token.
        top: the `TOP_K` + 1 best log probabilities, in descending order.
    """
    if case.temperature == 0:
        return top[0] - top[1]
    masses = [math.exp(logprob / case.temperature) for logprob in top[:TOP_K]]
    bound = math.log(TOP_P / (1 - TOP_P))
    odds = [_log_odds(masses, count) for count in range(1, TOP_K)]
    nucleus = masses[: 1 + sum(one < bound for one in odds)]
    number = uniform(case.seed, 0, index)
    random_odds = math.log(number / (1 - number))
    kept = [_log_odds(nucleus, count) for count in range(1, len(nucleus))]
    drawn = sum(one <= random_odds for one in kept)
    moves = [abs(one - bound) for one in odds] + [abs(one - random_odds) for one in kept]
    swaps = [top[at] - top[at + 1] for at in (drawn - 1, drawn) if at >= 0]
    return min(*swaps, *(case.temperature * move for move in moves))


def _log_odds(masses: Sequence[float], count: int) -> float:
    """Return the log odds of the first ``count`` of unnormalized probabilities."""
    return math.log(sum(masses[:count]) / sum(masses[count:]))


def compare(reference: dict[str, Answer], other: dict[str, Answer]) -> Comparison:
    """Compare the answers of two deployments to the same cases."""
    equal = 0
    close = []
    different = []
    for name, expected in reference.items():
        found = other[name]
        if found.tokens == expected.tokens:
            equal += 1
            continue
        pairs = enumerate(zip(expected.tokens, found.tokens, strict=False))
        at = next((at for at, (a, b) in pairs if a != b), None)
        if at is None:
            different.append(f"{name}: {len(found.tokens)} tokens, not {len(expected.tokens)}")
        elif expected.gaps[at] < EPSILON:
            close.append(f"{name}: token {at}, gap {expected.gaps[at]:.4f}")
        else:
            different.append(f"{name}: token {at}, gap {expected.gaps[at]:.4f}")
    return Comparison(equal, tuple(close), tuple(different))


def digests(running: Running, process: str, event: str) -> dict[str, str]:
    """Return the digest of each request's KV pages that one worker logged, by request id."""
    records = running.records(process, event)
    return {str(r["request_id"]): str(r["digest"]) for r in records if r.get("digest")}


@dataclass(frozen=True)
class Row:
    """Comparison of a deployment with its colocated reference of one rank.

    Attributes:
        digests: numbers of equal and of compared page digests; None if no pages are sent.
    """

    name: str
    comparison: Comparison
    digests: tuple[int, int] | None = None

    @property
    def passed(self) -> bool:
        """Whether no answer is different and all digests are equal."""
        equal, compared = self.digests or (1, 1)
        return not self.comparison.different and 0 < compared == equal


def colocated(
    cases: Sequence[Case], model_flags: Sequence[str] = (), concurrency: int = CONCURRENCY
) -> dict[str, Answer]:
    """Return the answers of a colocated deployment, the reference."""
    with deployed("--colocated", *model_flags) as running:
        running.wait_for_all_workers()
        return asyncio.run(ask_all(running, cases, concurrency))


def run(
    cases: Sequence[Case],
    reference: dict[str, Answer],
    model_flags: Sequence[str],
    label: str,
    concurrency: int = CONCURRENCY,
    codecs: Sequence[str] = ("raw", "splitzip"),
) -> Iterator[Row]:
    """Send the cases to a disaggregated deployment for each codec.

    Slabs of the raw deployment have two slots of 64 KiB. Most prompts are larger than such a slab
    and are sent in several rounds.
    """
    for codec in codecs:
        slab = _tiny_slabs() if codec == "raw" else {}
        flags = ("--codec", codec, *model_flags)
        with deployed(*flags, environment=LOG_DIGESTS | slab) as running:
            yield compared(running, cases, reference, f"{label}, {codec}", concurrency)


def compared(
    running: Running,
    cases: Sequence[Case],
    reference: dict[str, Answer],
    label: str,
    concurrency: int = CONCURRENCY,
) -> Row:
    """Send the cases to a deployment of one prefill and one decode worker with `LOG_DIGESTS`."""
    running.wait_for_all_workers()  # until then, prefill workers decode
    answers = asyncio.run(ask_all(running, cases, concurrency))
    running.wait_until_idle()  # digests may be logged after the answers
    sent = digests(running, "prefill-0", "kv computed")
    landed = digests(running, "decode-0", "kv verified")
    equal = sum(sent.get(request) == digest for request, digest in landed.items())
    return Row(label, compare(reference, answers), (equal, len(landed)))


LOG_DIGESTS = {
    f"HEADRACE_{role}_{name}": value
    for role in ("PREFILL", "DECODE")
    for name, value in (("KV_DIGEST", "true"), ("LOG_FORMAT", "json"))
}


def _tiny_slabs() -> dict[str, str]:
    sizes = {"SLOTS": "2", "SLOT_BYTES": str(64 << 10)}
    return {f"HEADRACE_{r}_{k}": v for r in ("PREFILL", "DECODE") for k, v in sizes.items()}


def _of_ranks(
    cases: Sequence[Case],
    reference: dict[str, Answer],
    model_flags: Sequence[str],
    ranks: str,
    label: str,
    concurrency: int,
) -> Iterator[Row]:
    """Send the cases to a deployment whose workers have several ranks.

    Args:
        ranks: ``2+3`` for prefill and decode workers, ``4`` for a colocated worker.
    """
    *prefill, decode = ranks.split("+")
    flags = (*model_flags, "--decode-tp", decode)
    if prefill:
        flags += ("--prefill-tp", prefill[0])
        name = f"{label}, {prefill[0]} to {decode} ranks"
        yield from run(cases, reference, flags, name, concurrency, ["splitzip"])
    else:
        answers = colocated(cases, flags, concurrency)
        yield Row(f"{label}, {decode} ranks", compare(reference, answers))


def _rows(own: argparse.Namespace, cases: Sequence[Case]) -> Iterator[Row]:
    for keep in own.keep:
        name = "dense" if keep == 1 else f"factorized, keep {keep:g}"
        flags = ("--model", own.model, "--keep", f"{keep:g}", "--kv-format", own.kv_format)
        reference = colocated(cases, flags, own.concurrency)
        yield from run(cases, reference, flags, name, own.concurrency, own.codecs)
        for ranks in own.ranks:
            yield from _of_ranks(cases, reference, flags, ranks, name, own.concurrency)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.equality")
    add = parser.add_argument
    add("--prompts", type=int, default=50)
    add(
        "--concurrency", type=int, default=CONCURRENCY,
        help="number of concurrent requests; on a GPU, 1 makes all batches and tokens equal",
    )  # fmt: skip
    add("--model", default=DEFAULT_MODEL, help="name or path of a checkpoint")
    add("--kv-format", default="dense", help="KV format of all deployments")
    add("--keep", type=float, nargs="+", default=[1.0, 0.8], help="--keep of the deployments")
    add(
        "--codecs", nargs="*", default=["raw", "splitzip"],
        help="codecs of the deployments of one rank, which may be none",
    )  # fmt: skip
    add(
        "--ranks",
        nargs="+",
        default=["2+3"],
        help="ranks of the other deployments: 2+3 (prefill + decode) or 4 (colocated)",
    )
    own = parser.parse_args()
    console = Console(width=110)
    cases = make_cases(own.prompts, longest=3000, max_tokens=48, model=own.model)
    table = Table("deployment", "equal", "close", "different", "page digests equal")
    passed = True
    for row in _rows(own, cases):
        found = row.comparison
        counts = (
            f"{found.equal} of {len(cases)}",
            str(len(found.close)),
            str(len(found.different)),
        )
        digests = "{} of {}".format(*row.digests) if row.digests else ""
        table.add_row(row.name, *counts, digests)
        for line in (f"{counts[0]} equal", *found.close, *found.different):
            console.print(f"{row.name}: {line}")
        passed &= row.passed
    console.print(table)
    console.print(f"close: a change of two logits' difference by less than {EPSILON} may cause it")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
