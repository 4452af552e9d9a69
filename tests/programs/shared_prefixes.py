"""Compare the tokens of a deployment that keeps prefixes with those of one that does not.

``python -m tests.programs.shared_prefixes`` sends random chats to a deployment of one prefill and
one decode worker without a prefix cache, and then the same prompts to one with it. Chats start with
one of a few system prompts, grow with the answers of the first deployment, and fork. Some turns
have four choices, some chats a salt. A difference is `close` or a failure as in
`tests.programs.equality`, because a prompt that is computed from another token on may round
differently.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from grpc import aio
from rich.console import Console

from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from runtime.offline.compress import documentation
from runtime.pages.plan import PAGE_SIZE
from services.common.model_source import DEFAULT_MODEL, resolve_model
from services.tokenizer.loading import load_tokenizer
from tests.harness.deployment import Running, deployed
from tests.programs.equality import TOP_K, TOP_P, Answer, Case, Comparison, compare, gap_of

if TYPE_CHECKING:  # defined in the type stubs only
    from headrace.v1.inference_pb2_grpc import InferenceAsyncStub

SYSTEM_PROMPTS = (40, 130, 250)
"""Lengths of the system prompts in tokens."""
TURNS, FORKS, ANSWER = 3, 0.3, 20
CONCURRENCY = 4
"""Concurrent chats, unless ``--concurrency`` is given."""


@dataclass(frozen=True)
class Turn:
    """One request of a chat. A turn with several choices is greedy."""

    case: Case
    choices: int
    salt: str


@dataclass
class Result:
    """Answers and cached prompt tokens of a deployment, by the name of the turn."""

    answers: dict[str, Answer] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)


class Chats:
    """Random chats over the tokens of a text. The same seed gives the same chats.

    Args:
        text: tokens from which prompts are cut.
        concurrency: number of chats at a time.
        answer_tokens: length of each answer.
    """

    def __init__(
        self,
        text: Sequence[int],
        count: int,
        seed: int,
        concurrency: int = CONCURRENCY,
        answer_tokens: int = ANSWER,
    ) -> None:
        self._text = text
        self._answer_tokens = answer_tokens
        self.concurrency = concurrency
        rng = random.Random(seed)
        systems = [self._cut(rng, length) for length in SYSTEM_PROMPTS]
        self.count = count
        self._seeds = [rng.getrandbits(32) for _ in range(count)]
        self._starts = [rng.choice(systems) for _ in range(count)]
        self.turns: list[list[Turn]] = [[] for _ in range(count)]

    def next_turn(self, chat: int, history: Sequence[int], number: int) -> Turn:
        """Return a turn after a history, which is empty for the first one."""
        rng = random.Random(f"{self._seeds[chat]} {number}")
        before = list(history) or list(self._starts[chat])
        if history and rng.random() < FORKS:
            before = before[: rng.randint(1, len(before))]
        prompt = (*before, *self._cut(rng, rng.randint(3, 60)))
        choices = rng.choice((1, 1, 1, 4))
        temperature = rng.choice((0.0, 0.8)) if choices == 1 else 0.0
        name = f"chat {chat}, turn {number}"
        case = Case(name, prompt, temperature, rng.getrandbits(32), self._answer_tokens)
        turn = Turn(case, choices, salt="salt" if chat % 5 == 4 else "")
        self.turns[chat].append(turn)
        return turn

    def _cut(self, rng: random.Random, length: int) -> tuple[int, ...]:
        start = rng.randrange(len(self._text) - length)
        return tuple(self._text[start : start + length])


async def play(running: Running, chats: Chats) -> Result:
    """Send all chats, some at a time; their turns are made from the answers."""
    result = Result()

    async def send(stub: "InferenceAsyncStub", chat: int) -> None:
        history: tuple[int, ...] = ()
        for number in range(TURNS):
            turn = chats.next_turn(chat, history, number)
            await ask(stub, turn, result)
            history = history_after(turn, result)

    await _each(running, chats, send)
    return result


def history_after(turn: Turn, result: Result) -> tuple[int, ...]:
    """Return the tokens of a turn and of its first answer."""
    answer = result.answers[turn.case.name].tokens[: turn.case.max_tokens]
    return turn.case.prompt + answer


async def replay(running: Running, chats: Chats) -> Result:
    """Send the turns that `play` has made, in the same order of each chat."""
    result = Result()

    async def send(stub: "InferenceAsyncStub", chat: int) -> None:
        for turn in chats.turns[chat]:
            await ask(stub, turn, result)

    await _each(running, chats, send)
    return result


async def _each(running: Running, chats: Chats, send) -> None:  # type: ignore[no-untyped-def]
    limit = asyncio.Semaphore(chats.concurrency)
    async with aio.insecure_channel(running.grpc_target) as channel:
        stub = InferenceStub(channel)

        async def one(chat: int) -> None:
            async with limit:
                await send(stub, chat)

        await asyncio.gather(*map(one, range(chats.count)))


def request_of(turn: Turn) -> pb.GenerateRequest:
    case = turn.case
    return pb.GenerateRequest(
        tokens=pb.TokenIds(ids=case.prompt),
        max_tokens=case.max_tokens,
        temperature=case.temperature,
        top_k=TOP_K,
        top_p=TOP_P,
        seed=case.seed,
        n=turn.choices,
        logprobs=TOP_K + 1,
        ignore_eos=True,
        cache_salt=turn.salt,
    )


async def ask(stub: "InferenceAsyncStub", turn: Turn, result: Result) -> None:
    """Send a turn; the tokens of its choices follow one another."""
    case = turn.case
    tokens: list[list[int]] = [[] for _ in range(turn.choices)]
    gaps: list[list[float]] = [[] for _ in range(turn.choices)]
    async for response in stub.Generate(request_of(turn)):
        choice = response.choice
        for token in response.tokens:
            top = sorted((top.logprob for top in token.top), reverse=True)
            gaps[choice].append(gap_of(case, len(tokens[choice]), top))
            tokens[choice].append(token.token)
        if response.HasField("usage"):
            result.cached[case.name] = response.usage.cached_tokens
    result.answers[case.name] = Answer(
        tuple(token for each in tokens for token in each),
        tuple(gap for each in gaps for gap in each),
    )


@dataclass(frozen=True)
class Outcome:
    """Comparison of both deployments.

    Attributes:
        cached, prompt: cached tokens and all tokens of the prompts.
        saved_bytes: bytes of KV that were not transferred.
        history: tokens whose KV the prefill worker has read from the decode worker.
    """

    comparison: Comparison
    cached: int
    prompt: int
    saved_bytes: float
    history: float


def run(
    count: int,
    flags: Sequence[str] = (),
    seed: int = 3,
    model: str = DEFAULT_MODEL,
    concurrency: int = CONCURRENCY,
) -> Outcome:
    """Compare both deployments over ``count`` chats.

    Args:
        flags: further flags of both deployments.
        concurrency: number of chats at a time.
    """
    text = load_tokenizer(resolve_model(model)).encode(documentation()[1])
    chats = Chats(text, count, seed, concurrency)
    flags = ("--model", model, *flags)
    with deployed(*flags, environment=_cache("false")) as running:
        running.wait_for_all_workers()
        cold = asyncio.run(play(running, chats))
    assert not any(cold.cached.values())
    with deployed(*flags, environment=_cache("true")) as running:
        running.wait_for_all_workers()
        warm = asyncio.run(replay(running, chats))
        running.wait_until_idle()
        saved = running.metric("decode-0", "headrace_kv_saved_bytes_total")
        history = running.metric("prefill-0", "headrace_kv_history_tokens_total")
    turns = [turn.case for chat in chats.turns for turn in chat]
    for turn in turns:
        cached = warm.cached[turn.name]
        assert cached % PAGE_SIZE == 0
        assert cached < len(turn.prompt)
    prompt = sum(len(turn.prompt) for turn in turns)
    comparison = compare(cold.answers, warm.answers)
    return Outcome(comparison, sum(warm.cached.values()), prompt, saved, history)


def _cache(value: str) -> dict[str, str]:
    return {f"HEADRACE_{role}_PREFIX_CACHE": value for role in ("PREFILL", "DECODE")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.shared_prefixes")
    parser.add_argument("--chats", type=int, default=66, help="number of chats of three turns")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="chats at a time")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or path of a checkpoint")
    parser.add_argument("--kv-format", default="dense", help="KV format of the workers")
    parser.add_argument("--seed", type=int, default=3)
    own = parser.parse_args()
    flags = ("--kv-format", own.kv_format)
    found = run(own.chats, flags, own.seed, own.model, own.concurrency)
    comparison = found.comparison
    console = Console(highlight=False)
    console.print(
        f"{own.kv_format}: {comparison.equal} equal, {len(comparison.close)} close, "
        f"{len(comparison.different)} different; {found.cached:,} of {found.prompt:,} prompt "
        f"tokens cached, {found.saved_bytes / 1e6:,.1f} MB not transferred, "
        f"{found.history:,.0f} tokens of history read",
        soft_wrap=True,
    )
    for line in (*comparison.close, *comparison.different):
        console.print(line, markup=False)
    return bool(comparison.different)


if __name__ == "__main__":
    sys.exit(main())
