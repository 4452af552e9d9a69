"""Limits of requests that depend on the workers."""

import structlog

from services.common.listings import ModelReadiness
from services.gateway.settings import GatewaySettings

log = structlog.get_logger()


class ModelLimits:
    """Limits that the workers of the model registered. Settings can only lower them.

    Attributes:
        context_length: maximum tokens of a prompt and its output; None until it is known.
        max_logprobs: maximum alternatives for each token in log probabilities.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.context_length = settings.context_length
        self.max_logprobs = settings.max_logprobs
        self._largest_prompt = 0

    def update(self, found: ModelReadiness) -> None:
        """Update the limits from a router's answer. Limits that it lacks are not changed."""
        if found.context_length is not None:
            lowered = self._settings.context_length
            self.context_length = min(found.context_length, lowered or found.context_length)
        if found.infos:
            registered = min(info.max_logprobs for info in found.infos)
            self.max_logprobs = min(registered, self._settings.max_logprobs)
            self._check_body(max(info.vocab_size for info in found.infos))

    def _check_body(self, vocab_size: int) -> None:
        """Warn if the limit on bodies excludes prompts that the workers accept.

        The limit is a setting, because bodies must be bounded before any worker has registered.
        """
        digits_and_comma = len(str(vocab_size - 1)) + 1
        largest = (self.context_length or 0) * digits_and_comma
        limit = self._settings.max_body_bytes
        if largest > max(limit, self._largest_prompt):
            log.warning(
                "max_body_bytes excludes prompts of token ids that fit the context",
                max_body_bytes=limit,
                context_length=self.context_length,
                prompt_bytes=largest,
            )
        self._largest_prompt = largest
