"""The encoder that a gateway serves."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
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
        facts: the encoder as ready workers registered it last; None until then. Of several
            versions, it is the one known before, if a worker of that is ready.
        batch_tokens: see `EncoderReadiness.batch_tokens`.
        not_ready: why no request can be served now, or None.
    """

    name: str
    tokenizer: EncoderTokenizer
    identity: TokenizerIdentity
    created: int
    facts: EncoderModel | None = None
    batch_tokens: int = 0
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
        fitting = [each for each in found.infos if not self.identity.mismatch(each)]
        self.not_ready = None if fitting else self._unfit(found.infos[0])
        if fitting:
            self.facts = _facts(fitting, self.facts)
            self.batch_tokens = found.batch_tokens

    def known(self) -> EncoderModel:
        """Return the facts.

        Raises:
            Unavailable: if no worker has registered yet.
        """
        if self.facts is None:
            raise Unavailable(self.not_ready or "no encoder worker has registered")
        return self.facts

    def _unfit(self, model: EncoderModel) -> str:
        fault = self.identity.mismatch(model)
        return f"the gateway's tokenizer does not match the encoder of the workers: {fault}"


def _facts(infos: Sequence[EncoderModel], known: EncoderModel | None) -> EncoderModel:
    """Return the facts of one version. All of its workers accept ``max_tokens`` tokens."""
    hashes = [each.model_hash for each in infos]
    version = known.model_hash if known and known.model_hash in hashes else hashes[0]
    same = [each for each in infos if each.model_hash == version]
    return min(same, key=attrgetter("max_tokens"))


def _reason(name: str, found: EncoderReadiness | None, listed: EncoderList) -> str:
    if found is not None:
        return found.reason or "no encoder worker is ready"
    others = ", ".join(repr(each.model) for each in listed.models)
    return f"no worker of the encoder {name!r} is registered" + (others and f", only of {others}")
