"""Tokenizers: text to token ids and back, and conversations to prompts.

A tokenizer is read from a GGUF file (vocabulary, merges and chat template in its metadata) or from
a Hugging Face directory (``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``).

Decoding looks up the bytes of each token in a table and decodes the concatenated bytes as UTF-8.
Two kinds of vocabulary are supported: byte-level with GPT-2's alphabet, and SentencePiece with byte
fallback. Because both use the table, incremental and full decoding give the same text.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from services.common.chat_template import ChatTemplate
from services.common.content_guard import ContentGuard
from services.common.gguf_metadata import MetadataError, read_metadata
from services.common.token_pieces import (
    TokenizerError,
    byte_level_pieces,
    flat_decoders,
    pieces_for,
)

__all__ = [
    "IncrementalDetokenizer",
    "SpecialTokens",
    "Tokenizer",
    "TokenizerError",
    "load_tokenizer",
]

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the BOS and EOS tokens, and texts of special tokens by names such as ``bos_token``."""

    bos: int | None
    eos: tuple[int, ...]
    names: dict[str, str]


class Tokenizer:
    """A tokenizer, created by `load_tokenizer`. Thread-safe.

    Args:
        strips_space: whether `decode` removes a leading space.

    Attributes:
        pieces: bytes of each token.
        visible_pieces: like ``pieces``, but with empty bytes for special tokens.
        context_length: context length of the model in tokens, if its files state it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        *,
        pieces: Sequence[bytes],
        strips_space: bool = False,
        chat_template: ChatTemplate | None = None,
        context_length: int | None = None,
    ) -> None:
        self._backend = backend
        self._strips_space = strips_space
        self.pieces = tuple(pieces)
        self.eos_ids = special.eos
        self.bos_id = special.bos
        self.special_names = special.names
        self.chat_template = chat_template
        self.context_length = context_length
        self.special_ids = frozenset(
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        hidden = list(self.pieces)
        for id in self.special_ids:
            hidden[id] = b""
        self.visible_pieces = tuple(hidden)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special: add the special tokens that the model expects, such as BOS.
            parse_special: convert text such as ``<|im_end|>`` to the special token of that name
                instead of treating it as plain text.
        """
        if parse_special:
            return _encode(self._backend, text, add_special=add_special)
        return _encode(self._guard.backend, self._guard.protect(text), add_special=add_special)

    def encode_rendered(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt from `render_chat`."""
        return _encode(self._guard.backend, prompt, add_special=False)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        detokenizer = IncrementalDetokenizer(self, skip_special=skip_special)
        text = detokenizer.push(ids) + detokenizer.finish()
        return text.removeprefix(" ") if self._strips_space else text

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the prompt of a conversation, up to the start of the assistant's message.

        The result is for `encode_rendered`: names of special tokens in the content are protected,
        as `ContentGuard` describes. The prompt of any other conversation is that of the template.

        Args:
            messages: mappings with ``role`` and ``content``.

        Raises:
            ChatTemplateError: if the model has no template, or it rejects the messages.
        """
        template = self.chat_template or ChatTemplate.missing()
        protect = self._guard.protect
        guarded = [{**message, "content": protect(message["content"])} for message in messages]
        return template.render(guarded, self.special_names)

    def save(self, directory: Path) -> None:
        """Write the tokenizer files of a Hugging Face directory, which `load_tokenizer` can read.

        Raises:
            OSError: if the directory cannot be written.
        """
        config: dict[str, Any] = dict(self.special_names)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template.source
        (directory / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")
        text = json.dumps(config, indent=1, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    @cached_property
    def _guard(self) -> ContentGuard:
        ends = (self._backend.id_to_token(id) or "" for id in self.eos_ids)
        return ContentGuard(self._backend, (*ends, *self.special_names.values()))


def _encode(backend: tokenizers.Tokenizer, text: str, *, add_special: bool) -> list[int]:
    # Only the batch call releases the interpreter lock. Without it, encoding a long text in a
    # thread would block the event loop.
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special)
    return list(encoding.ids)


class IncrementalDetokenizer:
    """Decodes a growing sequence and returns complete characters only.

    The concatenated results of `push` and `finish` are the text of the sequence. Unlike in
    `Tokenizer.decode`, a leading space is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._pieces = tokenizer.visible_pieces if skip_special else tokenizer.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Append ids and return the new complete characters; skip ids outside the vocabulary."""
        pieces, size = self._pieces, len(self._pieces)
        return self._utf8.decode(b"".join([pieces[id] for id in ids if id < size]))

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, else an empty string."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a GGUF file or of a Hugging Face directory.

    Raises:
        TokenizerError: if files are missing, damaged or not supported.
    """
    try:
        return _load_directory(path) if path.is_dir() else _load_gguf(path)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except (OSError, MetadataError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read the tokenizer of {path}: {error}") from error


# Pre-tokenizers by their names in GGUF files. `llama-bpe` is the pre-tokenizer of Llama 3.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": lambda: _split(_WORDS + r"\p{N}{1,3}" + _REST),
    "qwen2": lambda: _split(_WORDS + r"\p{N}" + _REST),
}


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _load_gguf(path: Path) -> Tokenizer:
    metadata = read_metadata(path)
    fields = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    if fields.get("model") != "gpt2":
        raise TokenizerError(f"tokenizer model {fields.get('model')!r} is not supported, only gpt2")
    if fields.get("pre") not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"pre-tokenizer {fields.get('pre')!r} is not supported, only {list(_PRE_TOKENIZERS)}"
        )
    try:
        tokens, merges = fields["tokens"], [tuple(m.split(" ", 1)) for m in fields["merges"]]
        types = fields.get("token_type", [])
    except KeyError as error:
        raise TokenizerError(f"it has no entry tokenizer.ggml.{error.args[0]}") from None
    backend = _byte_level_backend(tokens, merges, types, fields["pre"])
    special = _gguf_special(fields, tokens)
    if fields.get("add_bos_token", fields["pre"] == "llama-bpe") and special.bos is not None:
        bos = tokens[special.bos]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, special.bos)]
        )
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        special,
        pieces=byte_level_pieces(backend),
        chat_template=ChatTemplate(template) if template else None,
        context_length=metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    )


def _byte_level_backend(
    tokens: list[str], merges: list[Any], types: list[int], pre: str
) -> tokenizers.Tokenizer:
    try:
        model = models.BPE(
            vocab={token: id for id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    except Exception as error:
        raise TokenizerError(f"the vocabulary and the merges are inconsistent: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    backend.decoder = decoders.ByteLevel()  # only for `save`: `decode` uses the table
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    return backend


def _gguf_special(fields: dict[str, Any], tokens: list[str]) -> SpecialTokens:
    def id_of(key: str) -> int | None:
        id = fields.get(f"{key}_token_id")
        if id is not None and not 0 <= id < len(tokens):
            raise TokenizerError(f"{key}_token_id {id} is outside the vocabulary")
        return id

    ids = {name: id_of(name) for name in ("bos", "eos", "eot", "padding", "unknown")}
    return SpecialTokens(
        bos=ids["bos"],
        eos=tuple(sorted({id for id in (ids["eos"], ids["eot"]) if id is not None})),
        names={
            f"{name}_token": tokens[id]
            for name, id in (("bos", ids["bos"]), ("eos", ids["eos"]), ("unk", ids["unknown"]))
            if id is not None
        },
    )


_CANONICAL_CONFIG = "headrace.json"  # replaces config.json in a canonical checkpoint


def _load_directory(path: Path) -> Tokenizer:
    if not (path / "tokenizer.json").is_file():
        raise TokenizerError("no tokenizer.json in this directory")
    text = (path / "tokenizer.json").read_text(encoding="utf-8")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise TokenizerError(f"tokenizer.json is not supported: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    model = _read_json(path / "config.json") or _read_json(path / _CANONICAL_CONFIG).get(
        "config", {}
    )
    steps = flat_decoders(json.loads(text).get("decoder"))
    return Tokenizer(
        backend,
        _directory_special(path, config, model, backend),
        pieces=pieces_for(backend, steps),
        strips_space=any(d["type"] == "Strip" and d.get("start") for d in steps),
        chat_template=ChatTemplate.from_directory(path, config),
        context_length=model.get("max_position_embeddings"),
    )


def _directory_special(
    path: Path, config: dict[str, Any], model: dict[str, Any], backend: tokenizers.Tokenizer
) -> SpecialTokens:
    def name(key: str) -> str | None:
        value = config.get(key)
        return value["content"] if isinstance(value, dict) else value

    names = {key: name(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    known = {key: value for key, value in names.items() if value}
    eos = {backend.token_to_id(known.get("eos_token", ""))}
    for source in (model, _read_json(path / "generation_config.json")):
        declared = source.get("eos_token_id")
        eos.update(declared if isinstance(declared, list) else [declared])
    bos = backend.token_to_id(known["bos_token"]) if "bos_token" in known else None
    return SpecialTokens(bos, tuple(sorted(id for id in eos if id is not None)), known)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TokenizerError(f"{path.name} is not a JSON object")
    return content
