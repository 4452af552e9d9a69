"""Tokens that files beside ``tokenizer.json`` declare, with the precedence of transformers.

``tokenizer_config.json`` names special tokens (``bos_token``, any other ``…_token``, and those in
``extra_special_tokens``) and, in newer checkpoints, lists all added tokens by id
(``added_tokens_decoder``). Without such a list, ``special_tokens_map.json`` overrides the names of
``tokenizer_config.json``, and ``added_tokens.json`` lists tokens that are added to the vocabulary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from services.tokenizer.json_files import read_json
from services.tokenizer.pieces import TokenizerError, table_size

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA = "extra_special_tokens"
_OLD_EXTRA = "additional_special_tokens"


@dataclass(frozen=True)
class DeclaredTokens:
    """Tokens that the files of a checkpoint's directory declare.

    Attributes:
        names: texts of special tokens, by their name in chat templates, such as ``bos_token``.
        extra: texts of special tokens without a name.
        added: tokens that the files add to the vocabulary of the model, in the order of their ids.
    """

    names: dict[str, str]
    extra: tuple[str, ...]
    added: tuple[AddedToken, ...]

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any], in_json: Iterable[Any]) -> Self:
        """Read the declarations in the files of a directory.

        Args:
            path: the directory.
            config: content of ``tokenizer_config.json``.
            in_json: entries of ``added_tokens`` in ``tokenizer.json``.

        Raises:
            TokenizerError: if a declaration has an invalid type.
        """
        facts = dict(config)
        if not facts.get(_EXTRA) and _OLD_EXTRA in facts:
            facts[_EXTRA] = facts.pop(_OLD_EXTRA)
        by_name = facts.pop(_EXTRA) if isinstance(facts.get(_EXTRA), dict) else {}
        listed = facts.get("added_tokens_decoder")
        if listed is None:
            facts |= _special_tokens_map(path, facts.get(_EXTRA))
            by_name |= facts.pop(_EXTRA) if isinstance(facts.get(_EXTRA), dict) else {}
            added = _added_tokens(path, facts) | {token["id"]: _added(token) for token in in_json}
        else:
            added = {int(id): _added(token) for id, token in listed.items()}
        names = {key: _text(facts[key]) for key in _NAMED if facts.get(key)}
        names |= {
            key: _text(value)
            for key, value in facts.items()
            if key.endswith("_token") and isinstance(value, str | dict) and value
        }
        names |= {key: _text(value) for key, value in by_name.items()}
        texts = tuple(map(_text, facts.get(_EXTRA, facts.get(_OLD_EXTRA)) or ()))
        return cls(names, texts, tuple(added[id] for id in sorted(added)))


def complete(
    backend: tokenizers.Tokenizer, declared: DeclaredTokens, vocab_size: int | None
) -> None:
    """Add the declared tokens that a tokenizer lacks. New tokens get the next ids.

    Args:
        vocab_size: number of tokens of the model. Tokens that do not fit are left out: the model
            has no embedding for them.
    """
    tokens = {token.content: token for token in declared.added}
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text in (*declared.names.values(), *declared.extra):
        if text not in present:
            tokens.setdefault(text, AddedToken(text, special=True))
    for token in tokens.values():
        if token.content in declared.names.values():
            token.special = True
        fits = vocab_size is None or table_size(backend) < vocab_size
        if fits or backend.token_to_id(token.content) is not None:
            backend.add_tokens([token])


def _special_tokens_map(path: Path, declared: Any) -> dict[str, Any]:
    """Return ``special_tokens_map.json``, with the extra tokens of both files."""
    found = read_json(path / "special_tokens_map.json")
    extra = found.get(_EXTRA)
    if isinstance(extra, list):
        known = list(declared or [])
        found[_EXTRA] = [*known, *(token for token in extra if token not in known)]
    return found


def _added_tokens(path: Path, facts: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens of ``added_tokens.json`` by id."""
    declared = [facts[key] for key in _NAMED if facts.get(key)] + list(facts.get(_EXTRA) or [])
    special = set(map(_text, declared))
    return {
        id: AddedToken(text, normalized=text not in special, special=text in special)
        for text, id in read_json(path / "added_tokens.json").items()
    }


def _added(fields: Any) -> AddedToken:
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise TokenizerError(f"{fields!r} does not describe a token")
    given = {key: value for key, value in fields.items() if key not in ("id", "__type")}
    return AddedToken(**given)


def _text(token: Any) -> str:
    """Return the text of a token that is a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TokenizerError(f"{token!r} is not a special token")
    return text
