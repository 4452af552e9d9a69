"""Tokenizers of Hugging Face directories: ``tokenizer.json`` and the files beside it."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.declared_tokens import DeclaredTokens, complete
from services.tokenizer.json_files import read_json
from services.tokenizer.pieces import TokenizerError, flat_decoders, pieces_for
from services.tokenizer.tokenizer import SpecialTokens, Tokenizer

TOKENIZER_FILE = "tokenizer.json"
_FILES = frozenset(
    [
        TOKENIZER_FILE,
        *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("chat_template.json", "vocab.json", "vocab.txt", "merges.txt"),
    ]
)
_SENTENCEPIECE = ".model"
_CANONICAL_CONFIG = "headrace.json"
"""File that replaces config.json in a canonical checkpoint."""


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory has a tokenizer that `load_directory` reads."""
    return (path / TOKENIZER_FILE).is_file()


def is_tokenizer_file(path: Path) -> bool:
    """Return whether a file of a directory belongs to its tokenizer, judged by its name."""
    return path.name in _FILES or path.suffix == _SENTENCEPIECE


def load_directory(path: Path) -> Tokenizer:
    """Load the tokenizer of a directory. The errors are those of `load_tokenizer`."""
    text = (path / TOKENIZER_FILE).read_text(encoding="utf-8")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise TokenizerError(f"tokenizer.json is not supported: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(path / "tokenizer_config.json")
    model = read_json(path / "config.json") or read_json(path / _CANONICAL_CONFIG).get("config", {})
    description = json.loads(text)
    declared = DeclaredTokens.read(path, config, description["added_tokens"])
    complete(backend, declared, model.get("vocab_size"))
    steps = flat_decoders(description.get("decoder"))
    return Tokenizer(
        backend,
        _special(path, declared.names, model, backend),
        pieces=pieces_for(backend, steps),
        strips_space=any(d["type"] == "Strip" and d.get("start") for d in steps),
        chat_template=ChatTemplate.from_directory(path, config),
    )


def _special(
    path: Path, names: dict[str, str], model: dict[str, Any], backend: tokenizers.Tokenizer
) -> SpecialTokens:
    eos = {backend.token_to_id(names.get("eos_token", ""))}
    for source in (model, read_json(path / "generation_config.json")):
        declared = source.get("eos_token_id")
        eos.update(declared if isinstance(declared, list) else [declared])
    return SpecialTokens(tuple(sorted(id for id in eos if id is not None)), names)
