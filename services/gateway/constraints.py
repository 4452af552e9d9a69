"""Constraints on output, as requests carry them inside the gateway."""

from dataclasses import dataclass

from runtime.grammar.spec import GrammarSpec


@dataclass(frozen=True)
class Constraint:
    """A constraint on the output of a request.

    Attributes:
        field: name of the client's field, for error messages.
    """

    spec: GrammarSpec
    field: str
