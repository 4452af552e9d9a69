"""Bound on the log probabilities of prompts in one response."""

from collections.abc import Sequence

from services.common.errors import InvalidRequest
from services.gateway.requests import GenerationRequest


def check_prompt_logprobs(requests: Sequence[GenerationRequest], limit: int) -> None:
    """Check the number of log probabilities of the prompts of one client request.

    Args:
        requests: one for each prompt.
        limit: maximum number, alternatives and choices included.

    Raises:
        InvalidRequest: if there are too many.
    """
    count = sum(
        request.prompt_tokens * (1 + request.options.prompt_top) * request.options.n
        for request in requests
        if request.options.prompt_top is not None
    )
    if count > limit:
        name = "echo" if requests[0].options.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            f"{name}: {count} log probabilities of prompt tokens, with their alternatives and for "
            f"all choices; at most {limit} are returned",
            param=name,
        )
