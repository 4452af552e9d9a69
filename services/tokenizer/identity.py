"""Comparison of a gateway's tokenizer with the model of the workers."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.common.encoder_placement import EncoderModel
from services.common.placement import ModelInfo
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.pieces import TokenizerError
from services.tokenizer.tokenizer import Tokenizer

_PADDING = re.compile(rb"\[PAD\d+\]")


@dataclass(frozen=True)
class TokenizerIdentity:
    """Properties of a tokenizer.

    Attributes:
        vocab_size: number of tokens. A model may have more: padding of its embedding.
        eos_ids: ids of the tokens that end the output.
        hash: SHA-256 of the bytes of all tokens in the order of their ids, as hex digits. It does
            not depend on the file format. Padding tokens that converters append are ignored.
    """

    vocab_size: int
    eos_ids: frozenset[int]
    hash: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        pieces = list(tokenizer.pieces)
        while pieces and _PADDING.fullmatch(pieces[-1]):
            pieces.pop()
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        return cls(len(pieces), frozenset(tokenizer.eos_ids), digest.hexdigest())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the tokenizer of a model's files; return None if there is no usable one."""
        try:
            return cls.of(load_tokenizer(path))
        except TokenizerError:
            return None

    def stop_token_ids(self, model: ModelInfo) -> tuple[int, ...]:
        """Return the tokens that end the output of a model.

        These are the tokens that the workers registered. A worker without a tokenizer registers
        only those of the model's configuration. Those of this tokenizer are then added, because a
        chat model may name the end of a turn in the tokenizer's files alone.
        """
        if model.tokenizer_hash:
            return model.eos_token_ids
        return tuple(sorted(self.eos_ids.union(model.eos_token_ids)))

    def mismatch(self, model: ModelInfo | EncoderModel) -> str | None:
        """Return why a model cannot be served with this tokenizer, or None."""
        if self.vocab_size > model.vocab_size:
            return f"it has {self.vocab_size} tokens, the model of the workers {model.vocab_size}"
        if model.tokenizer_hash and model.tokenizer_hash != self.hash:
            return "its vocabulary is not that of the workers' tokenizer"
        return None
