"""Keep names of special tokens in a text from becoming special tokens.

A chat template writes special tokens and the client's content into one prompt. Content with a name
such as ``<|im_end|>`` could then end its own turn and forge another. `ContentGuard.protect` inserts
marks between the characters of such names. The guarded tokenizer looks for special tokens first,
then removes the marks, so a protected name is encoded as ordinary text. Texts without such names
get the same ids as from the original tokenizer.
"""

import json
from collections.abc import Iterable

import tokenizers

_ESCAPE = "\ufdd0"  # a Unicode noncharacter
_MARK = _ESCAPE + "0"
_LITERAL = _ESCAPE + "1"  # stands for the escape character itself
_UNESCAPE = [
    {"type": "Replace", "pattern": {"String": _MARK}, "content": ""},
    {"type": "Replace", "pattern": {"String": _LITERAL}, "content": _ESCAPE},
]


class ContentGuard:
    """Protects texts from `backend`'s special tokens.

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
        self.backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        self._names = sorted((name for name in reserved if len(name) > 1), key=len, reverse=True)
        self._first = {name[0] for name in self._names} | {_ESCAPE}

    def protect(self, text: str) -> str:
        """Return ``text`` with marks inside of the names of special tokens."""
        if not any(character in text for character in self._first):
            return text
        text = text.replace(_ESCAPE, _LITERAL)
        # One search per name, not one regular expression: each is linear in the text.
        for name in self._names:
            if name in text:
                text = text.replace(name, _MARK.join(name))
        return text
