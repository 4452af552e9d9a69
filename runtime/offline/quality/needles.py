"""Retrieval of facts from long contexts: passkey, several keys, and variable tracking.

A context is filler text with facts at given depths. Its KV is computed as that of a prompt, with
exact KV. Question and answer are then computed as decode steps would compute them, so that every
token of both attends to stored pages. An answer counts as found if the best token at each of its
positions is the expected one. Greedy decoding would then have generated the answer.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.errors import QualityError
from runtime.kv.cache import PagedCache
from runtime.kv.compressed import CompressedFormat
from runtime.kv.format import KVFormat
from runtime.models.model import Model
from runtime.offline.quality.attention import TeacherForced
from runtime.offline.quality.prompts import ChatEncoder
from runtime.pages.plan import PageCount, pages_for

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Positions of the facts, as fractions of the context."""
REQUIRED = 0.95
"""Fraction of answers that exact KV must find for a task and length to count."""
_INTRODUCTION = "There is important information hidden in the following text. Memorize it.\n"
_FILLER = (
    "The hills are quiet in the morning. A cart passes on the road. The mill turns slowly. "
    "Then the rain stops, and the birds return. "
)
_NAMES = (
    *("apple", "river", "stone", "cloud", "candle", "garden", "mirror", "bridge"),
    *("forest", "window", "pepper", "silver", "rocket", "violin", "anchor"),
)
_DIGITS = 5
_TOKENS = 2560
"""Maximum tokens of all contexts, per requested sample; see `samples_of`."""


@dataclass(frozen=True)
class Query:
    """A question about a context, as tokens that follow the context.

    Attributes:
        depth: which fact the question asks for, as an index into `DEPTHS`.
        question: tokens between the context and the answer.
        answer: tokens of the expected answer.
    """

    depth: int
    question: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Context:
    """A context and the questions about it. Each question follows the context directly."""

    tokens: tuple[int, ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class NeedleScore:
    """Answers found in contexts of one length.

    Attributes:
        task: key of `TASKS`.
        length: tokens of context, question and answer.
        asked: questions for each of `DEPTHS`.
        exact: number of answers found with exact KV, for each of `DEPTHS`. If exact KV could not
            reach `REQUIRED`, the remaining questions were not asked.
        found: number of answers found with the compressed format, for each of `DEPTHS`; None if
            exact KV did not reach `REQUIRED`.
    """

    task: str
    length: int
    seed: int
    asked: int
    exact: tuple[int, ...]
    found: tuple[int, ...] | None


class _Facts:
    """Facts and questions of one sample: a distinct name and value for each depth.

    The values differ in their first digit, so that the first token already identifies the fact.
    """

    def __init__(self, generator: random.Random) -> None:
        names = generator.sample(_NAMES, 2 * len(DEPTHS))
        self.names = names[: len(DEPTHS)]
        self.copies = names[len(DEPTHS) :]
        first = generator.sample("123456789", len(DEPTHS))
        others = ["".join(generator.choices("0123456789", k=_DIGITS - 1)) for _ in DEPTHS]
        self.values = [digit + rest for digit, rest in zip(first, others, strict=True)]


_Placed = list[tuple[float, str]]
"""Facts with their depths."""
_Asked = tuple[int, str, str]
"""Index of a depth, question, and the beginning of the answer."""


def _passkey(facts: _Facts) -> Iterator[tuple[_Placed, list[_Asked]]]:
    """One fact in each context."""
    for index, (depth, value) in enumerate(zip(DEPTHS, facts.values, strict=True)):
        fact = f" The pass key is {value}. Remember it. The pass key is {value}. "
        yield [(depth, fact)], [(index, "What is the pass key?", "The pass key is ")]


def _multi_key(facts: _Facts) -> Iterator[tuple[_Placed, list[_Asked]]]:
    """All facts in one context; each question contains the name of one fact."""
    placed = [
        (depth, f" The {name} pass key: {name} {value}. ")
        for depth, name, value in zip(DEPTHS, facts.names, facts.values, strict=True)
    ]
    asked = [
        (index, f"What is the {name} pass key?", f"The {name} pass key: {name} ")
        for index, name in enumerate(facts.names)
    ]
    yield placed, asked


def _variable_tracking(facts: _Facts) -> Iterator[tuple[_Placed, list[_Asked]]]:
    """Chains of two assignments; the second is 1/20 of the context after the first."""
    placed: _Placed = []
    asked: list[_Asked] = []
    chains = zip(DEPTHS, facts.names, facts.copies, facts.values, strict=True)
    for index, (depth, name, copy, value) in enumerate(chains):
        placed.append((depth, f" VAR {name} = {value}. "))
        placed.append((depth + 0.05, f" VAR {copy} = VAR {name}. "))
        asked.append((index, f"What is the value of VAR {copy}?", f"The value of VAR {copy} is "))
    yield placed, asked


TASKS: dict[str, Callable[[_Facts], Iterator[tuple[_Placed, list[_Asked]]]]] = {
    "passkey": _passkey,
    "multi-key": _multi_key,
    "variable-tracking": _variable_tracking,
}


def samples_of(task: str, length: int, samples: int) -> int:
    """Return how many of ``samples`` samples to measure, to limit the time of long contexts.

    The contexts of the returned number of samples have at most ``2560 * samples`` tokens in total.
    The result is 1 if even one sample has more. A sample of "passkey" has a context for each depth.
    """
    each = length * (len(DEPTHS) if TASKS[task] is _passkey else 1)
    return max(1, min(samples, samples * _TOKENS // each))


def contexts(
    task: str, length: int, samples: int, seed: int, chat_encoder: ChatEncoder
) -> Iterator[Context]:
    """Yield contexts with ``samples`` questions for each depth.

    A context with its longest question and answer has ``length`` tokens.

    Raises:
        QualityError: the facts do not fit into ``length`` tokens.
    """
    generator = random.Random(f"{task} {length} {seed}")
    filler = chat_encoder.encode(_FILLER)
    before = chat_encoder.encode(chat_encoder.start_of_question(_INTRODUCTION))
    for _ in range(samples):
        facts = _Facts(generator)
        for placed, asked in TASKS[task](facts):
            queries = tuple(
                Query(
                    index,
                    tuple(
                        chat_encoder.encode(chat_encoder.end_of_question(f"\n{question}", answer))
                    ),
                    tuple(chat_encoder.encode(facts.values[index])),
                )
                for index, question, answer in asked
            )
            longest = max(len(query.question) + len(query.answer) for query in queries)
            needles = [(depth, chat_encoder.encode(fact)) for depth, fact in placed]
            room = length - len(before) - longest - sum(len(fact) for _, fact in needles)
            if room < len(needles):
                raise QualityError(f"{task}: the facts do not fit into {length} tokens")
            text = (filler * (room // len(filler) + 1))[:room]
            tokens = list(before)
            done = 0
            for depth, fact in needles:
                at = int(depth * room)
                tokens += [*text[done:at], *fact]
                done = at
            yield Context((*tokens, *text[done:]), queries)


@torch.inference_mode()
def measure_needles(
    model: Model,
    chat_encoder: ChatEncoder,
    formats: Mapping[str, CompressedFormat],
    task: str,
    length: int,
    *,
    samples: int,
    seed: int,
    window: bool = True,
) -> dict[str, NeedleScore]:
    """Measure one task at one length for several formats.

    Exact KV answers first. As soon as it can no longer reach `REQUIRED`, no more questions are
    asked.

    Args:
        formats: formats by name; the result has the same keys.
        window: see `TeacherForced`.
    """
    tested = {
        name: TeacherForced(model.config, compressed, window=window)
        for name, compressed in formats.items()
    }
    exact = TeacherForced(model.config, None, window=window)
    dense = [0] * len(DEPTHS)
    found = {name: [0] * len(DEPTHS) for name in formats}
    allowed = int((1 - REQUIRED) * samples * len(DEPTHS) + 1e-9)
    missed = 0
    for context in contexts(task, length, samples, seed, chat_encoder):
        answers = _Answers(model, context)
        for query in context.queries:
            right = answers.found(query, exact)
            dense[query.depth] += right
            missed += not right
        if missed > allowed:
            break
        for name, kv_format in tested.items():
            for query in context.queries:
                found[name][query.depth] += answers.found(query, kv_format)
    counted = missed <= allowed
    return {
        name: NeedleScore(
            task, length, seed, samples, tuple(dense), tuple(one) if counted else None
        )
        for name, one in found.items()
    }


class _Answers:
    """KV of a context, over which questions are answered one after another."""

    def __init__(self, model: Model, context: Context) -> None:
        self._model = model
        self._length = len(context.tokens)
        longest = max(len(query.question) + len(query.answer) for query in context.queries)
        self._pages = list(range(pages_for(self._length + longest, model.page_size)))
        self._cache = PagedCache(model.layout, PageCount(len(self._pages)))
        model.forward(self._batch(context.tokens, 0, 1), self._cache)

    def found(self, query: Query, kv_format: KVFormat) -> bool:
        """Return whether greedy decoding would generate the answer."""
        tokens = query.question + query.answer[:-1]
        batch = self._batch(tokens, self._length, len(query.answer))
        own, self._model.kv_format = self._model.kv_format, kv_format
        try:
            logits = self._model.forward(batch, self._cache)
        finally:
            self._model.kv_format = own
        if not logits.isfinite().all():
            raise QualityError("logits are not finite")
        return logits.argmax(-1).tolist() == list(query.answer)

    def _batch(self, tokens: Sequence[int], first: int, logits: int) -> Batch:
        """Return a batch of one slice with logits at the last ``logits`` tokens."""
        batch = Batch.of([SequenceSlice(tokens, first, self._pages)])
        return replace(batch, logit_rows=torch.arange(len(tokens) - logits, len(tokens)))
