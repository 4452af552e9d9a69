"""Limits of requests that depend on the workers."""

from services.common.listings import ModelReadiness
from services.gateway.settings import GatewaySettings


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

    def update(self, found: ModelReadiness) -> None:
        """Update the limits from a router's answer. Limits that it lacks are not changed."""
        if found.context_length is not None:
            lowered = self._settings.context_length
            self.context_length = min(found.context_length, lowered or found.context_length)
        if found.infos:
            registered = min(info.max_logprobs for info in found.infos)
            self.max_logprobs = min(registered, self._settings.max_logprobs)
