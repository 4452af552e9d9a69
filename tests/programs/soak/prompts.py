"""Requests of a soak: chats whose histories have the answers of the reference."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from headrace.v1 import inference_pb2 as pb
from headrace.v1.inference_pb2_grpc import InferenceStub
from tests.harness.deployment import Running

CHATS = 40
CHAT_REQUESTS = 150
"""Smallest number of different chats, and requests that are prepared for each further one."""
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. ",
    "Water boils at a temperature of 100 degrees at sea level. ",
    "Once upon a time there was a miller who had three sons. ",
    "In Python, a list is written with square brackets: [1, 2, 3]. ",
    "The first law of motion says that a body stays at rest unless a force acts on it. ",
    "Tell me a long story about the sea, the ships and the lighthouse. ",
    "She opened the window, looked at the garden, and closed it again. ",
    "To bake bread, mix flour, water, salt and yeast, and wait for an hour. ",
)
INPUT_TOKENS = (3, 3, 16, 16, 40, 40, 64, 130, 300, 1500)
OUTPUT_TOKENS = (1, 2, 20, 100, 300, 1000)
MESSAGE_TOKENS = (1, 16, 50)
"""Lengths of the messages after the first one."""
FORKS = 0.3
"""Share of the turns that continue the history from an earlier point on."""
CLEAR = 2e-3
"""Answers end before a token whose log probability, in nats, exceeds that of another one by less. A
prompt whose beginning is cached may round differently there."""
CONCURRENT = 8
"""Chats that the reference answers at once."""


@dataclass(frozen=True)
class Turn:
    """One request, as in a file of the load generator."""

    prompt: tuple[int, ...]
    max_tokens: int


def write_prompts(
    path: Path, running: Running, reference: Running, *, seed: int, count: int, turns: int
) -> None:
    """Write ``count`` requests for the load generator, as token ids of the deployment's model.

    Args:
        reference: deployment that answers the turns of chats; it computes each of them once more
            when the answers are compared.
        turns: maximum number of turns of a chat.
    """
    rng = random.Random(seed)
    number = max(CHATS, count // CHAT_REQUESTS) if turns > 1 else CHATS
    texts = ["".join(rng.sample(TEXTS, len(TEXTS)) * 12) for _ in range(number)]
    stub = reference.stub()

    def chat_of(text: str, seed: int) -> list[Turn]:
        return _play(stub, _tokenize(running, text), turns, random.Random(seed))

    with ThreadPoolExecutor(CONCURRENT) as pool:
        chats = list(pool.map(chat_of, texts, [rng.getrandbits(32) for _ in texts]))
    with path.open("w") as file:
        file.writelines(json.dumps(asdict(turn)) + "\n" for turn in interleave(chats, count, rng))


def interleave(chats: Sequence[Sequence[Turn]], count: int, rng: random.Random) -> Iterator[Turn]:
    """Yield the next turn of a random chat, ``count`` times; a chat starts again at its end."""
    played: Counter[int] = Counter()
    for _ in range(count):
        chat = rng.randrange(len(chats))
        yield chats[chat][played[chat] % len(chats[chat])]
        played[chat] += 1


def _play(stub: InferenceStub, text: Sequence[int], turns: int, rng: random.Random) -> list[Turn]:
    """Return the turns of a chat of at least one, whose messages are cut from a text."""
    found: list[Turn] = []
    prompt = tuple(text[: rng.choice(INPUT_TOKENS)])
    while len(found) < turns:
        answer = _clear_answer(stub, prompt, rng.choice(OUTPUT_TOKENS))
        if answer:
            found.append(Turn(prompt, len(answer)))
        history = prompt + answer
        if rng.random() < FORKS:
            history = history[: rng.randint(1, len(history))]
        start = rng.randrange(len(text) - max(MESSAGE_TOKENS))
        prompt = history + tuple(text[start:][: rng.choice(MESSAGE_TOKENS)])
    return found


def _clear_answer(stub: InferenceStub, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Return the greedy answer before its first token that is not clear."""
    answer: list[int] = []
    call = stub.Generate(
        pb.GenerateRequest(
            tokens=pb.TokenIds(ids=prompt), max_tokens=max_tokens, temperature=0, logprobs=2
        )
    )
    for response in call:
        for token in response.tokens:
            best, second = sorted((top.logprob for top in token.top), reverse=True)
            if best - second < CLEAR:
                call.cancel()
                return tuple(answer)
            answer.append(token.token)
    return tuple(answer)


def _tokenize(running: Running, text: str) -> list[int]:
    answer = httpx.post(
        f"{running.url}/tokenize",
        json={"model": running.model, "prompt": text},
        timeout=60,
        trust_env=False,
    )
    tokens: list[int] = answer.raise_for_status().json()["tokens"]
    return tokens
