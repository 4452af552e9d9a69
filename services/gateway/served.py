"""The models that a gateway serves: one that generates text, an encoder, or both."""

import time
from dataclasses import dataclass

import structlog

from services.common.errors import SettingsError
from services.common.model_source import model_name, resolve_model
from services.gateway.encoding.models import ServedEncoder
from services.gateway.settings import NO_MODEL, GatewaySettings
from services.tokenizer.identity import TokenizerIdentity
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer

log = structlog.get_logger()


@dataclass(frozen=True)
class ServedModel:
    """The model that a gateway serves.

    Attributes:
        created: time at which it was loaded, seconds since 1970.
        generates: whether it generates text. If not, it is the encoder of the gateway, whose
            tokenizer serves the routes that show tokens.
    """

    name: str
    tokenizer: Tokenizer
    identity: TokenizerIdentity
    created: int
    generates: bool = True

    @classmethod
    def load(cls, settings: GatewaySettings) -> "ServedModel":
        """Read the tokenizer of the model in the settings.

        Raises:
            SettingsError: if the model is missing or its tokenizer is not supported.
        """
        path = resolve_model(settings.model)
        tokenizer = load_tokenizer(path)
        if tokenizer.chat_template is not None and tokenizer.chat_template.problem:
            log.warning("chats will be refused", reason=tokenizer.chat_template.problem)
        tokenizer.encode_rendered("")  # builds what would otherwise delay the first chat
        name = settings.served_model_name or model_name(path)
        identity = TokenizerIdentity.of(tokenizer)
        return cls(name, tokenizer, identity, int(time.time()))

    @classmethod
    def of_encoder(cls, encoder: ServedEncoder) -> "ServedModel":
        """Return the model of a gateway that generates no text."""
        tokenizer = encoder.tokenizer.plain
        return cls(encoder.name, tokenizer, encoder.identity, encoder.created, generates=False)


@dataclass(frozen=True)
class Served:
    """The models that a gateway serves.

    Attributes:
        encoder: the encoder; None if there is none.
    """

    model: ServedModel
    encoder: ServedEncoder | None = None

    @classmethod
    def load(cls, settings: GatewaySettings) -> "Served":
        """Read the tokenizers of the models in the settings.

        Raises:
            SettingsError: if a model is missing or its tokenizer is not supported, or if both have
                one name.
        """
        encoder = None
        if settings.encoder_model is not None:
            encoder = ServedEncoder.load(settings.encoder_model, settings.served_encoder_name)
            if settings.model == NO_MODEL:
                return cls(ServedModel.of_encoder(encoder), encoder)
        model = ServedModel.load(settings)
        if encoder is not None and encoder.name == model.name:
            raise SettingsError(f"the model and the encoder are both served as {model.name!r}")
        return cls(model, encoder)
