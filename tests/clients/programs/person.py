"""A model of pydantic as structured output, and a sentence with its values."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

SENTENCE = "Extract the person: Anna is a child, 7 years old."


class Person(BaseModel):
    """What a sentence says about a person."""

    # Without this, some clients send a schema that allows further fields, and a small model goes on
    # to invent them.
    model_config = ConfigDict(extra="forbid")

    name: str
    age: int
    kind: Literal["adult", "child"]
