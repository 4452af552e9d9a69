"""Parts of grammars in llguidance's Lark syntax."""

import json
import re
from collections.abc import Mapping

SPACE = "[ \\t\\r\\n]"
"""Regular expression of the white space around the parts of a message."""
NOT_EMPTY, ANY = "/(?s:.+)/", "/(?s:.*)/"
"""Terminals of texts."""
_SYNTAX = re.compile(r"[\\/.+*?()|\[\]{}^$]")


class Marks:
    """Writes the marks of formats, such as ``<tool_call>``, which may be special tokens.

    Args:
        special_tokens: ids of the special tokens of the model, by their text.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._ids = special_tokens

    def exactly(self, mark: str) -> str:
        """Return an expression for a mark, as a special token or as text."""
        special = self._special(mark)
        return f"({quoted(mark)} | {special})" if special else quoted(mark)

    def up_to(self, name: str, mark: str, *conditions: str) -> list[str]:
        """Return the rule ``name`` for a text, which may be empty, and the mark after it.

        The mark must be part of the terminal of the text, unless it is a special token: terminals
        are as long as possible, so that the one of the text would include the start of the mark.

        Args:
            conditions: terminals that also match the text, which does not contain the mark.
        """
        terminal = name.upper()
        text = " & ".join([*conditions, without(mark)])
        rules = [f"{terminal}_AND_MARK: ({ANY} & {text}) {quoted(mark)}"]
        if special := self._special(mark):
            rules.append(f"{terminal}_TEXT: {NOT_EMPTY} & {text}")
            return [f"{name}: {terminal}_AND_MARK | {terminal}_TEXT? {special}", *rules]
        return [f"{name}: {terminal}_AND_MARK", *rules]

    def _special(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>" if mark in self._ids else ""


def quoted(text: str) -> str:
    """Return an expression for a text."""
    return json.dumps(text)


def without(mark: str) -> str:
    """Return a terminal for all that does not contain a mark."""
    return f"~/(?s:.*){_escaped(mark)}(?s:.*)/"


def not_beginning_with(mark: str) -> str:
    """Return a terminal for all that does not begin with a mark after optional white space."""
    return f"~/{SPACE}*{_escaped(mark)}(?s:.*)/"


def other_than(text: str) -> str:
    """Return a terminal for all but one text."""
    return f"~/{_escaped(text)}/"


def _escaped(text: str) -> str:
    return _SYNTAX.sub(r"\\\g<0>", text)
