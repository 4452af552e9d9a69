"""Tokenizers of GGUF files: vocabulary, merges and chat template in the metadata of the file.

Two models are supported, by their names in llama.cpp: ``gpt2`` (byte-level BPE) and ``llama``
(SentencePiece, with scores and byte fallback).
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from services.tokenizer import gguf_splits
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.gguf_metadata import read_metadata
from services.tokenizer.pieces import TokenizerError, byte_level_pieces, sentencepiece_pieces
from services.tokenizer.tokenizer import SpecialTokens, Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # token types of GGUF
_SPACE = "\u2581"

# Tokens that end a turn, by their names in llama.cpp.
_END_NAMES = frozenset(
    (
        *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<turn|>", "<|tool_response>"),
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>"),
        "<end_of_utterance>",
    )
)
# A name does not end a turn in vocabularies that have all of certain tokens: (tokens, name).
_NOT_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)


def load_gguf(path: Path) -> Tokenizer:
    """Load the tokenizer of a GGUF file. The errors are those of `load_tokenizer`."""
    metadata = read_metadata(path)
    fields = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    tokens = fields.get("tokens")
    if not tokens:
        raise TokenizerError("it has no entry tokenizer.ggml.tokens")
    sentencepiece = fields.get("model") == "llama"
    backend = _sentencepiece(fields) if sentencepiece else _byte_level(fields)
    special = _special(fields, sentencepiece)
    ends = {tokens[id] for id in special.eos}
    for token, kind in zip(tokens, _types(fields), strict=True):
        if kind in (_CONTROL, _USER_DEFINED) or token in ends:
            is_special = kind == _CONTROL or token in ends
            backend.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    backend.post_processor = _post_processor(fields, special)
    template = metadata.get("tokenizer.chat_template")
    tool_template = metadata.get("tokenizer.chat_template.tool_use")
    return Tokenizer(
        backend,
        special,
        pieces=sentencepiece_pieces(backend) if sentencepiece else byte_level_pieces(backend),
        strips_space=sentencepiece and fields.get("add_space_prefix", True),
        chat_template=ChatTemplate(template, tool_template) if template else None,
    )


def _byte_level(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    if fields.get("model") != "gpt2":
        raise TokenizerError(
            f"tokenizer model {fields.get('model')!r} is not supported, only gpt2 and llama"
        )
    name = fields.get("pre", "default")
    if name not in gguf_splits.KNOWN:
        raise TokenizerError(
            f"pre-tokenizer {name!r} is not supported, only {sorted(gguf_splits.KNOWN)}"
        )
    if "merges" not in fields:
        raise TokenizerError("it has no entry tokenizer.ggml.merges")
    model = _bpe(fields, _merges(fields), ignore_merges=name in gguf_splits.WHOLE_WORDS)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = gguf_splits.pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()  # only for `save`: `decode` uses the table
    return backend


def _sentencepiece(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    merges = _merges(fields) if "merges" in fields else _merges_of_scores(fields)
    unknown = fields.get("unknown_token_id", 0)
    model = _bpe(
        fields,
        merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=fields["tokens"][unknown] if unknown < len(fields["tokens"]) else None,
    )
    backend = tokenizers.Tokenizer(model)
    has_prefix = fields.get("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _bpe(fields: dict[str, Any], merges: list[Any], **options: Any) -> models.BPE:
    try:
        vocab = {token: id for id, token in enumerate(fields["tokens"])}
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:
        raise TokenizerError(f"the vocabulary and the merges are inconsistent: {error}") from error


def _merges(fields: dict[str, Any]) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (m.partition(" ") for m in fields["merges"])]


def _merges_of_scores(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, by falling score of the formed piece."""
    tokens = fields["tokens"]
    scores = fields.get("scores", ())
    if len(scores) != len(tokens):
        raise TokenizerError("tokenizer.ggml.scores does not have one score for each token")
    whole = (_UNKNOWN, _CONTROL, _BYTE)  # types of tokens that are never built from text
    rank = {
        token: id
        for id, (token, kind) in enumerate(zip(tokens, _types(fields), strict=True))
        if kind not in whole
    }
    pairs = [
        (-scores[id], cut, rank[token[:cut]], rank[token[cut:]])
        for token, id in rank.items()
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(pairs)]


def _types(fields: dict[str, Any]) -> Collection[int]:
    types: list[int] = fields.get("token_type", [])
    return [*types, *[1] * (len(fields["tokens"]) - len(types))]


def _special(fields: dict[str, Any], sentencepiece: bool) -> SpecialTokens:
    tokens: list[str] = fields["tokens"]
    defaults = {"unknown": 0, "bos": 1, "eos": 2} if sentencepiece else {}

    def id_of(name: str) -> int | None:
        id = fields.get(f"{name}_token_id", defaults.get(name))
        if id is not None and not 0 <= id < len(tokens):
            raise TokenizerError(f"{name}_token_id {id} is outside the vocabulary")
        return id

    ids = {name: id_of(name) for name in ("bos", "eos", "eot", "eom", "padding", "unknown")}
    present = _END_NAMES.intersection(tokens)
    named = present - {name for others, name in _NOT_ENDS if others <= present}
    ends = {ids["eos"], ids["eot"], ids["eom"]} | {tokens.index(name) for name in named}
    names = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    return SpecialTokens(
        eos=tuple(sorted(id for id in ends if id is not None)),
        names={f"{name}_token": tokens[id] for name, key in names if (id := ids[key]) is not None},
    )


def _post_processor(
    fields: dict[str, Any], special: SpecialTokens
) -> processors.TemplateProcessing | None:
    """Return the post-processor that adds BOS and EOS to a text, or None if neither is added."""
    starts = fields.get("model") == "llama" or fields.get("pre") in gguf_splits.WHOLE_WORDS
    first = special.names.get("bos_token") if fields.get("add_bos_token", starts) else None
    last = special.names.get("eos_token") if fields.get("add_eos_token") else None
    added = [token for token in (first, last) if token is not None]
    if not added:
        return None
    single = " ".join(token for token in (first, "$A", last) if token is not None)
    ids = [(token, fields["tokens"].index(token)) for token in added]
    return processors.TemplateProcessing(single=single, pair=None, special_tokens=ids)
