"""Chats of several turns with generated messages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.workload.base import Dialogue, Message, RequestSpec, Role, Turn
from loadgen.workload.lengths import IntArray, Lengths
from loadgen.workload.prefix import SharedPrefix, salt_tokens, salts, words_of
from loadgen.workload.prompts import Prompt, PromptWriter


@dataclass(frozen=True, slots=True)
class Chats:
    """Endless chats. The history of a turn contains the answers of the target.

    The first request of a chat consists of a system prompt, if there are prefixes, and a user
    message. Each later turn has all messages and answers before it, and another user message.
    Lengths are those of the messages alone: a chat template adds tokens to them.

    Attributes:
        turns: number of turns of a chat.
        inputs, outputs: lengths of user messages and of answers.
        prefix: system prompts; None for chats without one.
        think_s: mean seconds from the end of an answer to the next turn, exponentially distributed.
        cold: whether the first words of each request are unique, so that no prefix cache holds any
            part of it, not even the previous turn. Lengths do not change.
        variant: runs of one seed with different variants differ in the user messages.
    """

    turns: Lengths
    inputs: Lengths
    outputs: Lengths
    writer: PromptWriter
    prefix: SharedPrefix | None = None
    think_s: float = 0.0
    cold: bool = False
    variant: int = 0

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield the first request of each chat, endlessly. ``seed`` must not be negative."""
        draws = _Draws(self, seed)
        while True:
            plan = draws.chat()
            written = self.writer.write_parts([*plan.parts, *plan.salts])
            yield self._chat(plan, written[: len(plan.parts)], written[len(plan.parts) :])

    def _chat(self, plan: "_Plan", parts: Sequence[Prompt], salts: Sequence[Prompt]) -> RequestSpec:
        vocabulary = self.writer.vocabulary
        opening = parts[: len(parts) - len(plan.answers) + 1]
        roles = (Role.SYSTEM, Role.USER)[-len(opening) :]
        messages = (Message(role, one.prompt) for role, one in zip(roles, opening, strict=True))
        starts = [salt.prompt for salt in salts] or [""] * len(plan.answers)
        later = tuple(
            Turn(part.prompt, part.tokens, answer, think_s, start)
            for part, answer, think_s, start in zip(
                parts[len(opening) :], plan.answers[1:], plan.thinks_s, starts[1:], strict=True
            )
        )
        tokens = vocabulary.special + sum(one.tokens for one in (*opening, *salts[:1]))
        dialogue = Dialogue(tuple(messages), starts[0], vocabulary.lead)
        return RequestSpec(dialogue, tokens, plan.answers[0], later=later)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Lengths and words of one chat.

    Attributes:
        parts: words and lengths of the system prompt, if there is one, and of the user message of
            each turn. The first part lacks the salt and special tokens.
        salts: words and length of the salt of each turn; empty if the chat is not cold.
        answers: answer length of each turn.
        thinks_s: seconds before each turn but the first.
    """

    parts: list[tuple[IntArray, int]]
    salts: list[tuple[IntArray, int]]
    answers: list[int]
    thinks_s: list[float]


class _Draws:
    """Random draws of chats. Each quantity has a random generator of its own."""

    def __init__(self, chats: Chats, seed: int) -> None:
        children = np.random.SeedSequence(seed).spawn(7)
        generators = map(np.random.default_rng, children)
        self._turns, self._inputs, self._outputs, self._thinks, self._groups, *_ = generators
        self._words = words_of(children[5], chats.variant)
        self._unique = salts()
        self._chats = chats
        self._draw = chats.writer.vocabulary.draw
        self._systems: list[tuple[IntArray, int]] = []
        if chats.prefix is not None:
            prefixes, tokens = np.random.default_rng(children[6]), chats.prefix.tokens
            self._systems = [
                (self._draw(prefixes, tokens), tokens) for _ in range(chats.prefix.groups)
            ]

    def chat(self) -> _Plan:
        """Return the plan of the next chat."""
        chats = self._chats
        turns = int(chats.turns.draw(self._turns, 1)[0])
        lengths = chats.inputs.draw(self._inputs, turns).tolist()
        parts = [(self._draw(self._words, tokens), tokens) for tokens in lengths]
        if chats.prefix is not None:
            parts.insert(0, self._systems[chats.prefix.choose(self._groups, 1)[0]])
        words, tokens = parts[0]
        tokens = max(1, tokens - chats.writer.vocabulary.special)
        salt = salt_tokens(tokens) if chats.cold else 0
        parts[0] = words, tokens - salt
        unique = [(self._draw(self._unique, salt), salt) for _ in range(turns if salt else 0)]
        answers = chats.outputs.draw(self._outputs, turns).tolist()
        thinks_s = (self._thinks.exponential(1.0, turns - 1) * chats.think_s).tolist()
        return _Plan(parts, unique, answers, thinks_s)
