"""Tokenizers of Hugging Face directories: ``tokenizer.json`` and the files beside it."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.pieces import TokenizerError, flat_decoders, pieces_for
from services.tokenizer.tokenizer import SpecialTokens, Tokenizer

_CANONICAL_CONFIG = "headrace.json"  # replaces config.json in a canonical checkpoint


def load_directory(path: Path) -> Tokenizer:
    """Load the tokenizer of a directory. The errors are those of `load_tokenizer`."""
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
