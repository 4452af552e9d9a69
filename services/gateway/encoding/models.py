"""The encoder that a gateway serves."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from services.common.encoder_placement import EncoderList, EncoderModel, EncoderReadiness
from services.common.errors import Unavailable
from services.common.model_source import model_name, resolve_model
from services.tokenizer.encoder import EncoderTokenizer
from services.tokenizer.identity import TokenizerIdentity

log = structlog.get_logger()


@dataclass
class ServedEncoder:
    """The encoder of a gateway. What it computes is known once a worker has registered.

    Attributes:
        created: time at which it was loaded, seconds since 1970.
        facts: the encoder as ready workers registered it last; None until then.
        not_ready: why no request can be served now, or None.
    """

    name: str
    tokenizer: EncoderTokenizer
    identity: TokenizerIdentity
    created: int
    facts: EncoderModel | None = None
    not_ready: str | None = "no encoder worker has registered"

    @classmethod
    def load(cls, model: str, served_name: str | None) -> Self:
        """Read the tokenizer of an encoder.

        Raises:
            SettingsError: if the encoder is missing or its tokenizer is not supported.
        """
        path: Path = resolve_model(model)
        tokenizer = EncoderTokenizer.load(path)
        name = served_name or model_name(path)
        return cls(name, tokenizer, tokenizer.identity, int(time.time()))

    def update(self, listed: EncoderList | None) -> None:
        """Update the facts from a router's answer; None if no router answers."""
        if listed is None:
            self.not_ready = "no router answers"
            return
        found = next((each for each in listed.models if each.model == self.name), None)
        if found is None or not found.ready:
            self.not_ready = _reason(self.name, found, listed)
            return
        self.not_ready = next(filter(None, map(self._unfit, found.infos)), None)
        if self.not_ready is None:
            self.facts = found.infos[0]

    def known(self) -> EncoderModel:
        """Return the facts.

        Raises:
            Unavailable: if no worker has registered yet.
        """
        if self.facts is None:
            raise Unavailable(self.not_ready or "no encoder worker has registered")
        return self.facts

    def _unfit(self, model: EncoderModel) -> str | None:
        if fault := self.identity.mismatch(model):
            return f"the gateway's tokenizer does not match the encoder of the workers: {fault}"
        return None


def _reason(name: str, found: EncoderReadiness | None, listed: EncoderList) -> str:
    if found is not None:
        return found.reason or "no encoder worker is ready"
    others = ", ".join(repr(each.model) for each in listed.models)
    return f"no worker of the encoder {name!r} is registered" + (others and f", only of {others}")
