"""Outputs that are computed without the engine, to compare with its outputs."""

from collections.abc import Generator

from torch import Tensor

from runtime.core.request import Request, SampledToken, SamplingParams
from runtime.engine import Engine
from runtime.sampling.reference import SamplingRow, sample

GREEDY = SamplingParams(repetition_penalty=1.5, logprobs=1)  # without it, tokens repeat
SEEDED = SamplingParams(temperature=0.8, seed=5, logprobs=1)


def sampled_by_hand(
    steps: Generator[Tensor, int, None], request: Request, choice: int = 0
) -> list[SampledToken]:
    """Return the output of a choice.

    Args:
        steps: yields logits `[1, vocab]` after the prompt and after each token that is sent.
    """
    logits = next(steps)
    tokens = list(request.tokens)
    output = []
    for index in range(request.max_tokens):
        row = SamplingRow(request.sampling, choice, tokens, request.prompt_tokens)
        [draw] = sample(logits, [row])
        assert draw is not None
        output.append(SampledToken(choice, index, draw.token, draw.logprob, draw.top))
        tokens.append(draw.token)
        logits = steps.send(draw.token)
    return output


def all_free(engine: Engine) -> bool:
    """Return whether no page of any pool is in use."""
    pages = engine.scheduler.pages
    return pages.free == pages.total
