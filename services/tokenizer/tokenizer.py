"""Tokenizers: text to token ids and back, and conversations to prompts.

Decoding looks up the bytes of each token in a table and decodes the concatenated bytes as UTF-8.
Two kinds of vocabulary are supported: byte-level with GPT-2's alphabet, and SentencePiece with byte
fallback. Because both use the table, incremental and full decoding give the same text.
"""

import codecs
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from runtime.pages.recent import Recent
from services.common.token_ids import pack_tokens
from services.tokenizer.chat_template import ChatTemplate, TemplateInput
from services.tokenizer.content_guard import ContentGuard
from services.tokenizer.prefix_encoder import EncodedText, PrefixEncoder


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the EOS tokens, and texts of special tokens by names such as ``bos_token``."""

    eos: tuple[int, ...]
    names: dict[str, str]


class Tokenizer:
    """A tokenizer, created by `services.tokenizer.loading`. Thread-safe.

    Args:
        strips_space: whether `decode` removes a leading space.

    Attributes:
        pieces: bytes of each token.
        visible_pieces: like ``pieces``, but with empty bytes for special tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        *,
        pieces: Sequence[bytes],
        strips_space: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._strips_space = strips_space
        self.pieces = tuple(pieces)
        self.eos_ids = special.eos
        self.special_names = special.names
        self.chat_template = chat_template
        self.special_ids = frozenset(
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        hidden = list(self.pieces)
        for id in self.special_ids:
            hidden[id] = b""
        self.visible_pieces = tuple(hidden)
        self._shown: dict[frozenset[int], tuple[bytes, ...]] = {}
        self._recent = Recent[EncodedText]()

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, by their text."""
        return {self.pieces[id].decode("utf-8", "replace"): id for id in self.special_ids}

    @property
    def json(self) -> str:
        """The vocabulary as the content of a ``tokenizer.json``."""
        return self._backend.to_str()

    def pieces_showing(self, names: Collection[str]) -> tuple[bytes, ...]:
        """Return `visible_pieces`, with the text of the special tokens of these names.

        The result is kept: call this with few different sets of names.
        """
        ids = frozenset(id for name, id in self.special_tokens.items() if name in names)
        if not ids:
            return self.visible_pieces
        if ids not in self._shown:
            shown = [
                self.pieces[id] if id in ids else p for id, p in enumerate(self.visible_pieces)
            ]
            self._shown[ids] = tuple(shown)
        return self._shown[ids]

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        salt: bytes | None = None,
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special: add the special tokens that the model expects, such as BOS.
            parse_special: convert text such as ``<|im_end|>`` to the special token of that name
                instead of treating it as plain text.
            salt: a long text takes less time if it begins like a recent one with the same salt.
                None: the time does not depend on other texts.
        """
        if parse_special:
            return self._plain.encode(text, add_special=add_special, salt=salt).tolist()
        text = self._guard.protect(text)
        return self._guarded.encode(text, add_special=add_special, salt=salt).tolist()

    def encode_rendered(self, prompt: str, *, salt: bytes | None = None) -> list[int]:
        """Return the token ids of a prompt from `render_chat`. ``salt`` is that of `encode`."""
        return self._guarded.encode(prompt, add_special=False, salt=salt).tolist()

    def pack(self, text: str, *, add_special: bool = True, salt: bytes | None = None) -> bytes:
        """Return the result of `encode`, packed by `pack_tokens`, without a list of the ids."""
        return pack_tokens(self._plain.encode(text, add_special=add_special, salt=salt))

    def pack_rendered(self, prompt: str, *, salt: bytes | None = None) -> bytes:
        """Return the result of `encode_rendered`, packed as in `pack`."""
        return pack_tokens(self._guarded.encode(prompt, add_special=False, salt=salt))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        detokenizer = IncrementalDetokenizer(self, skip_special=skip_special)
        text = detokenizer.push(ids) + detokenizer.finish()
        return text.removeprefix(" ") if self._strips_space else text

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the characters that each token of a prompt adds to its text.

        A character belongs to the token that completes it. Special tokens have their names, but one
        that `encode` adds at the beginning, such as BOS, has no text.
        """
        detokenizer = IncrementalDetokenizer(self, skip_special=False)
        added = self.encode("")[:1]
        hidden = bool(added) and list(ids[:1]) == added
        texts = ["" if hidden and not at else detokenizer.push((id,)) for at, id in enumerate(ids)]
        if texts:
            texts[-1] += detokenizer.finish()
        first = next((at for at, text in enumerate(texts) if text), None)
        if self._strips_space and first is not None:
            texts[first] = texts[first].removeprefix(" ")
        return texts

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], given: TemplateInput | None = None
    ) -> str:
        """Return the prompt of a conversation, up to the start of the assistant's message.

        The result is for `encode_rendered`: names of special tokens that the template did not write
        are protected, as `ContentGuard` describes. Without marks, it is the text of transformers.

        Args:
            messages: messages as in `ChatTemplate.render`.
            given: other variables of the template, which may move the end of the prompt.

        Raises:
            ChatTemplateError: if the model has no valid template, or it rejects the messages.
        """
        template = self.chat_template or ChatTemplate.missing()
        return self._guard.protect(template.render(messages, self.special_names, given))

    def save(self, directory: Path) -> None:
        """Write the tokenizer files of a Hugging Face directory, which `load_tokenizer` can read.

        Raises:
            OSError: if the directory cannot be written.
        """
        names = self.special_names
        config: dict[str, Any] = {k: v for k, v in names.items() if k.endswith("_token")}
        if others := {k: v for k, v in names.items() if k not in config}:
            config["extra_special_tokens"] = others
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template.declaration
        (directory / "tokenizer.json").write_text(self.json, encoding="utf-8")
        files = {
            "tokenizer_config.json": config,
            "generation_config.json": {"eos_token_id": list(self.eos_ids)},
        }
        for name, content in files.items():
            text = json.dumps(content, indent=1, ensure_ascii=False)
            (directory / name).write_text(text, encoding="utf-8")

    @cached_property
    def _guard(self) -> ContentGuard:
        ends = (self._backend.id_to_token(id) or "" for id in self.eos_ids)
        return ContentGuard(self._backend, (*ends, *self.special_names.values()))

    @cached_property
    def _plain(self) -> PrefixEncoder:
        return PrefixEncoder(self._backend, self.pieces, self._recent, "plain")

    @cached_property
    def _guarded(self) -> PrefixEncoder:
        return PrefixEncoder(self._guard.backend, self.pieces, self._recent, "guarded")


class IncrementalDetokenizer:
    """Decodes a growing sequence and returns complete characters only.

    The concatenated results of `push` and `finish` are the text of the sequence. Unlike in
    `Tokenizer.decode`, a leading space is kept.

    Args:
        shown: names of special tokens that are not skipped, see `Tokenizer.pieces_showing`.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, shown: Collection[str] = ()
    ) -> None:
        hidden = tokenizer.pieces_showing(shown) if shown else tokenizer.visible_pieces
        self._pieces = hidden if skip_special else tokenizer.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Append ids and return the new complete characters; skip ids outside the vocabulary."""
        pieces = self._pieces
        size = len(self._pieces)
        return self._utf8.decode(b"".join([pieces[id] for id in ids if id < size]))

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, else an empty string."""
        return self._utf8.decode(b"", final=True)
