"""Answers of a model to fixed questions: text for calibration, and a measure of fidelity."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.models.model import Model
from runtime.offline.quality.attention import TeacherForced
from runtime.offline.quality.generate import outputs_of
from runtime.offline.quality.measure import logits_of
from runtime.offline.quality.metrics import Scores, compare
from services.tokenizer.tokenizer import Tokenizer

_QUESTIONS = Path(__file__).with_name("questions.txt")
_HELD_OUT = 3
"""Every question whose number is a multiple of this one is held out."""
_PERIODS = range(1, 65)
"""Lengths in tokens of a sequence that a loop repeats."""
_LOOP_TOKENS, _LOOP_REPEATS = 24, 3


@dataclass(frozen=True)
class Chat:
    """Token ids of a question, in the model's chat template, and of its answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class ChatFidelity:
    """Answers of a model compared with those of the dense model.

    Attributes:
        chats: number of questions.
        kl_mean: mean KL divergence of the next-token distributions over all positions of the dense
            model's answers, in nats.
        top1: fraction of these positions at which both models have the same most probable token.
        loops, dense_loops: answers of this model, and of the dense one, that end in a loop.
    """

    chats: int
    kl_mean: float
    top1: float
    loops: int
    dense_loops: int


def questions() -> tuple[list[str], list[str]]:
    """Return the questions for calibration, and those that are held out."""
    lines = _QUESTIONS.read_text(encoding="utf-8").splitlines()
    held_out = lines[_HELD_OUT - 1 :: _HELD_OUT]
    return [line for line in lines if line not in held_out], held_out


def answer(model: Model, tokenizer: Tokenizer, asked: Sequence[str], max_tokens: int) -> list[Chat]:
    """Return the greedy answers of a model, with at most ``max_tokens`` tokens each."""
    prompts = [
        tokenizer.encode_rendered(tokenizer.render_chat([{"role": "user", "content": question}]))
        for question in asked
    ]
    answers = outputs_of(model, prompts, max_tokens)
    return [Chat(*pair) for pair in zip(prompts, answers, strict=True)]


def compare_chats(
    dense: Model, other: Model, chats: Sequence[Chat], max_tokens: int
) -> ChatFidelity:
    """Compare a model with the dense one.

    Args:
        dense, other: models built by `runtime.models.build.build_model`, without `runtime.gemm`.
        chats: answers of the dense model.
        max_tokens: maximum tokens of an answer of ``other``.
    """
    scores = [_scores(dense, other, chat) for chat in chats]
    answers = outputs_of(other, [chat.prompt for chat in chats], max_tokens)
    ends = dense.config.eos_token_ids
    return ChatFidelity(
        chats=len(chats),
        kl_mean=float(torch.cat([score.kl for score in scores]).mean()),
        top1=float(torch.cat([score.same for score in scores]).double().mean()),
        loops=sum(is_loop(tokens, ends) for tokens in answers),
        dense_loops=sum(is_loop(chat.answer, ends) for chat in chats),
    )


def is_loop(tokens: Sequence[int], ends: Sequence[int]) -> bool:
    """Return whether an answer was cut off while it repeated the same tokens.

    At its end, one sequence of tokens occurs at least `_LOOP_REPEATS` times in a row, and in at
    least `_LOOP_TOKENS` tokens.
    """
    if tokens and tokens[-1] in ends:
        return False
    for period in _PERIODS:
        length = max(_LOOP_TOKENS, _LOOP_REPEATS * period)
        if len(tokens) >= length and all(
            tokens[-at] == tokens[-at - period] for at in range(1, length - period + 1)
        ):
            return True
    return False


def _scores(dense: Model, other: Model, chat: Chat) -> Scores:
    """Compare the logits at the positions that predict the tokens of the answer."""
    text = torch.tensor([*chat.prompt, *chat.answer])
    answered = slice(len(chat.prompt) - 1, None)
    baseline, found = (
        logits_of(model, text, TeacherForced(model.config, None))[answered].cpu()
        for model in (dense, other)
    )
    return compare(baseline, found, text[answered])


def as_text(chats: Sequence[Chat]) -> list[int]:
    """Return the tokens of all chats, one after another."""
    return [token for chat in chats for token in (*chat.prompt, *chat.answer)]
