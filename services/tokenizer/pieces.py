"""Bytes of each token of a vocabulary."""

from typing import Any

import tokenizers

from services.common.errors import SettingsError


class TokenizerError(SettingsError):
    """A tokenizer cannot be read or is not supported."""


def flat_decoders(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the decoder of ``tokenizer.json`` as a flat list of steps."""
    if decoder is None:
        raise TokenizerError("tokenizer.json has no decoder")
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def pieces_for(backend: tokenizers.Tokenizer, decoders: list[dict[str, Any]]) -> list[bytes]:
    """Return the bytes of each token, according to the decoder steps of ``tokenizer.json``.

    Raises:
        TokenizerError: if a step is not supported.
    """
    kinds = {decoder["type"] for decoder in decoders}
    if "ByteLevel" in kinds:
        return byte_level_pieces(backend)
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return sentencepiece_pieces(backend)
    raise TokenizerError(f"tokenizer.json: the decoder steps {sorted(kinds)} are not supported")


def byte_level_pieces(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of each token of a byte-level vocabulary (GPT-2's byte alphabet)."""
    to_byte = str.maketrans(_byte_alphabet())
    added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
    pieces = []
    for id in range(table_size(backend)):
        token = backend.id_to_token(id) or ""
        try:
            pieces.append((added.get(id) or token).translate(to_byte).encode("latin-1"))
        except UnicodeEncodeError:
            pieces.append(token.encode())
    for id, content in added.items():
        pieces[id] = content.encode()
    return pieces


def _byte_alphabet() -> dict[str, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): chr(byte) for index, byte in enumerate(others)}


def sentencepiece_pieces(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of each SentencePiece token: U+2581 is a space, ``<0xNN>`` is one byte."""
    pieces = []
    for id in range(table_size(backend)):
        token = backend.id_to_token(id) or ""
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        pieces.append(
            bytes([int(token[3:5], 16)]) if is_byte else token.replace("\u2581", " ").encode()
        )
    return pieces


def table_size(backend: tokenizers.Tokenizer) -> int:
    """Return the largest token id plus one, which is the length of a table by token id."""
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
