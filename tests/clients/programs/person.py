"""A model of pydantic as structured output, and a sentence with its values."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

SENTENCE = "Extract the person: Anna is a child, 7 years old."


class Person(BaseModel):
    """A person, as a sentence describes one."""

    # By default, some clients send a schema that allows further fields. A small model adds many.
    model_config = ConfigDict(extra="forbid")

    name: str
    age: int
    kind: Literal["adult", "child"]
