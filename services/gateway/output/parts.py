"""The parts of an assistant's message, in the order in which the model writes them.

A parser yields parts while the output arrives. The concatenated parts of a message do not depend on
how the output was split.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a reasoning block, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of the arguments, JSON text, of the call that has started last."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of the call that has started last are complete."""


Part: TypeAlias = Content | Reasoning | CallStart | CallArguments | CallEnd
