"""Breaks of a text: positions at which encoding can start anew.

At a break, for every text::

    encode(text) == encode(text[:at]) + encode(text[at:])

A break is the position between a letter and whitespace, or between an ideograph and certain
punctuation (`_LAST_BREAK`). The equation is exact for the tokenizers that `has_breaks` accepts:

1. Added tokens are found from left to right, the longest one first, without regard to the text
   around them. None of them contains a break, so none crosses one.
2. No normalizer changes the text. The caller encodes texts that a normalizer may change whole.
3. No match of the pre-tokenizer's expressions contains a letter followed by whitespace or by the
   punctuation, so none crosses a break. Expressions do not look behind, so matches after a break do
   not depend on the text before it. A match before it is the same if the text ends there: a run of
   letters ends in both cases, and no expression looks further. The letter is matched by an
   expression for letters, so one word ends and the next one begins at the break.
4. Merges of byte-level BPE do not cross words.

The tokens have the bytes of the text, except bytes that the vocabulary lacks: accepted tokenizers
have no unknown token.
"""

import json
import re
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from services.tokenizer.gguf_splits import GPT_2, SEQUENCES

_LAST_BREAK = re.compile(
    rb"(?s:.*)(?:[A-Za-z](?=[ \t\r\n])"
    # Ideographs (U+5000 to U+8FFF) before CJK comma and full stop (U+3001, U+3002, U+FF0C).
    rb"|[\xe5-\xe8][\x80-\xbf]{2}(?=[ \t\r\n]|\xe3\x80[\x81\x82]|\xef\xbc\x8c))"
)
"""Matches the beginning of a text in UTF-8, up to its last break."""
_MAX_SEARCH = 1 << 16
"""Maximum number of bytes in which the last break is searched for."""


def last_break(data: bytes, end: int) -> int:
    """Return the last break of a text such that it and its next character are in ``data[:end]``.

    Args:
        data: a text in UTF-8.

    Returns:
        A position in bytes, or 0 if there is no break within 64 KiB before ``end``.
    """
    found = _LAST_BREAK.match(data, max(0, end - _MAX_SEARCH), end)
    return found.end() if found else 0


def has_breaks(backend: tokenizers.Tokenizer) -> bool:
    """Return whether a tokenizer has the properties that the module describes."""
    added = backend.get_added_tokens_decoder().values()
    return (
        _expressions(backend) in SEQUENCES
        and _is_plain_bpe(backend)
        and all(map(_may_leave_texts, steps_of(backend.normalizer)))
        and all(_is_plain_token(token, backend.normalizer) for token in added)
        and (backend.truncation, backend.padding) == (None, None)
    )


def _expressions(backend: tokenizers.Tokenizer) -> tuple[str, ...] | None:
    """Return the expressions by which a byte-level pre-tokenizer splits, or None for others."""
    *splits, last = steps_of(backend.pre_tokenizer) or [{"type": ""}]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    found = []
    for step in splits:
        if step["type"] == "Digits" and step["individual_digits"]:
            found.append(r"\p{N}")
        elif step["type"] == "Split" and (step["behavior"], step["invert"]) == ("Isolated", False):
            found.append(step["pattern"].get("Regex", ""))
        else:
            return None
    return (*found, GPT_2) if last["use_regex"] else tuple(found)


def _is_plain_bpe(backend: tokenizers.Tokenizer) -> bool:
    model = backend.model
    return isinstance(model, models.BPE) and not (
        model.unk_token is not None
        or model.dropout
        or model.byte_fallback
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
    )


def _may_leave_texts(step: dict[str, Any]) -> bool:
    """Return whether it is easy to tell which texts a step of a normalizer does not change."""
    return step["type"] == "NFC" or (step["type"] == "Replace" and "String" in step["pattern"])


def _is_plain_token(token: tokenizers.AddedToken, normalizer: Any) -> bool:
    """Return whether an added token is found wherever its text is, and contains no break."""
    text = token.content
    # Else the id could also be that of a token of the vocabulary, with other bytes.
    has_own_id = text.isascii() or max(text) > max(pre_tokenizers.ByteLevel.alphabet())
    return (
        has_own_id
        and not (token.lstrip or token.rstrip or token.single_word)
        and not _LAST_BREAK.match(text.encode())
        and (normalizer is None or normalizer.normalize_str(text) == text)
    )


def steps_of(component: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, a pre-tokenizer or a post-processor.

    Args:
        component: part of a `tokenizers.Tokenizer`; None has no steps.

    Returns:
        Objects as in ``tokenizer.json``. Steps of nested sequences are in one list.
    """
    return _flat(json.loads(component.__getstate__())) if component else []


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    (steps,) = (value for key, value in step.items() if key != "type")
    return [each for inner in steps for each in _flat(inner)]
