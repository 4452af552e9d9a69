"""Keep names of special tokens in a text from becoming special tokens.

A chat template writes special tokens and the client's content into one prompt. Content with a name
such as ``<|im_end|>`` could then end its own turn and forge another. `ContentGuard.protect` inserts
marks between the characters of names that the template did not write. The guarded tokenizer looks
for special tokens first, then removes the marks, so a protected name is encoded as ordinary text.
Texts without such names get the same ids as from the original tokenizer.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

from services.common.errors import InvalidRequest
from services.tokenizer.tracked_text import mask_of

_ESCAPE = "\ufdd0"
"""Escape character, a Unicode noncharacter."""
_MARK = _ESCAPE + "0"
_LITERAL = _ESCAPE + "1"
"""Escape sequence for the escape character itself."""
_UNESCAPE = [
    {"type": "Replace", "pattern": {"String": _MARK}, "content": ""},
    {"type": "Replace", "pattern": {"String": _LITERAL}, "content": _ESCAPE},
]
_RUN = re.compile("(?P<template>1+)|0+")
"""Matches a run of characters that are from the template, or a run of others."""
_NEVER = -1e6
"""Score of a piece that a Unigram model does not choose."""


class ContentGuard:
    """Keeps names in texts from becoming special tokens of ``backend``.

    Args:
        backend: the original tokenizer.
        names: texts of tokens that content must not produce, beside those that ``backend`` declares
            as special.

    Attributes:
        backend: tokenizer for texts that contain the results of `protect`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, names: Iterable[str]) -> None:
        description = json.loads(backend.to_str())
        reserved = set(names)
        for token in description["added_tokens"]:
            if token["special"] or token["content"] in reserved:
                reserved.add(token["content"])
                token["normalized"] = False  # matched before the normalizer removes the marks
        normalizer = description["normalizer"]
        steps = [*_UNESCAPE, normalizer] if normalizer else _UNESCAPE
        description["normalizer"] = {"type": "Sequence", "normalizers": steps}
        names = sorted((name for name in reserved if len(name) > 1), key=len, reverse=True)
        self._longest = max(map(len, names), default=1)
        # Names of tokens by their first two characters.
        self._names: dict[str, list[str]] = {}
        for name in names:
            self._names.setdefault(name[:2], []).append(name)
        _exclude_pieces(description["model"], frozenset(names))
        self.backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        protected = self.backend.encode_batch(
            [_MARK.join(name) for name in names], add_special_tokens=False
        )
        self._unprotected = {
            name
            for name, encoding in zip(names, protected, strict=True)
            if self.backend.token_to_id(name) in encoding.ids
        }

    def protect(self, text: str) -> str:
        """Return ``text`` with marks in names of special tokens, unless the template wrote them.

        `TrackedText` knows which characters the template wrote. A name is protected if the
        template did not write all of its characters.

        Raises:
            InvalidRequest: if the tokenizer encodes a protected name as the special token
                nevertheless. A tokenizer that encodes whole words may do so.
        """
        mask = mask_of(text)
        text = str.__str__(text)
        pieces = []
        for run in _RUN.finditer(mask):
            piece = text[run.start() : run.end()].replace(_ESCAPE, _LITERAL)
            if run.start() and self._crosses(text, run.start()):
                pieces.append(_MARK)
            pieces.append(piece if run["template"] else self._separate(piece))
        return "".join(pieces)

    def _crosses(self, text: str, edge: int) -> bool:
        """Return whether a name begins before position ``edge`` and ends after it."""
        for at in range(max(0, edge - self._longest + 1), edge):
            for name in self._names.get(text[at : at + 2], ()):
                if text.startswith(name, at) and at + len(name) > edge:
                    self._check(name)
                    return True
        return False

    def _separate(self, text: str) -> str:
        """Return a text with marks between the characters of all names."""
        # One search per name instead of one regular expression: a search takes linear time.
        for start, names in self._names.items():
            if start in text:
                for name in names:
                    if name in text:
                        self._check(name)
                        text = text.replace(name, _MARK.join(name))
        return text

    def _check(self, name: str) -> None:
        if name in self._unprotected:
            raise InvalidRequest(f"this model cannot read {name!r} as text")


def _exclude_pieces(model: dict[str, Any], names: frozenset[str]) -> None:
    """Give names of special tokens a score with which a Unigram model never chooses them.

    A Unigram model may choose any piece of its vocabulary. Other models need no change.

    Args:
        model: ``model`` of ``tokenizer.json``; modified in place.
    """
    if model["type"] == "Unigram":
        model["vocab"] = [
            [piece, _NEVER if piece in names else score] for piece, score in model["vocab"]
        ]
