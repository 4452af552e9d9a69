"""Tokenizers of GGUF files: vocabulary, merges and chat template in the metadata of the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.gguf_metadata import read_metadata
from services.tokenizer.pieces import TokenizerError, byte_level_pieces
from services.tokenizer.tokenizer import SpecialTokens, Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF

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


def load_gguf(path: Path) -> Tokenizer:
    """Load the tokenizer of a GGUF file. The errors are those of `load_tokenizer`."""
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
