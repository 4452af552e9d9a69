"""Fields of request bodies that constrain the output."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field

from runtime.grammar.spec import GrammarKind, GrammarSpec
from services.common.constraints import choice_constraint
from services.common.errors import InvalidRequest
from services.gateway.constraints import Constraint
from services.gateway.http.body_model import Body
from services.gateway.http.other_fields import IN_STRUCTURED_OUTPUTS

_Schema = dict[str, Any] | str
_Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]
_Text = Annotated[str, Field(min_length=1)]


class JsonSchemaFormat(Body):
    """The schema of a `ResponseFormat`. The output is always constrained, as with ``strict``."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema", description="JSON schema")]
    strict: Annotated[bool, Field(description="ignored: the output always follows the schema")] = (
        False
    )


class ResponseFormat(Body):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``; exactly one field."""

    others = IN_STRUCTURED_OUTPUTS

    json_: Annotated[
        _Schema | None, Field(alias="json", description="JSON schema, or its text")
    ] = None
    regex: Annotated[_Text | None, Field(description="regular expression for the whole output")] = (
        None
    )
    choice: Annotated[_Choices | None, Field(description="texts, of which the output is one")] = (
        None
    )
    grammar: Annotated[
        _Text | None, Field(description="grammar in llguidance's Lark syntax, or in GBNF")
    ] = None
    json_object: Annotated[bool, Field(description="any JSON object")] = False


class StructuredFields(BaseModel):
    """Fields that constrain the output. At most one of them may do so."""

    response_format: Annotated[
        ResponseFormat | None, Field(description="constrain the output to JSON")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="constrain the output, as in vLLM")
    ] = None
    guided_json: Annotated[
        _Schema | None, Field(description="older name of structured_outputs.json")
    ] = None
    guided_regex: Annotated[
        _Text | None, Field(description="older name of structured_outputs.regex")
    ] = None
    guided_choice: Annotated[
        _Choices | None, Field(description="older name of structured_outputs.choice")
    ] = None
    guided_grammar: Annotated[
        _Text | None, Field(description="older name of structured_outputs.grammar")
    ] = None

    def constraint(self) -> Constraint | None:
        """Return the constraint on the output.

        Raises:
            InvalidRequest: several fields constrain the output, or one is incomplete.
        """
        found = [*self._constraints()]
        if len(found) > 1:
            fields = " and ".join(constraint.field for constraint in found[:2])
            raise InvalidRequest(f"{fields} cannot be combined", param=found[1].field)
        return found[0] if found else None

    def _constraints(self) -> Iterator[Constraint]:
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            yield Constraint(GrammarSpec.json_object(), "response_format")
        if wanted is not None and wanted.type == "json_schema":
            field = "response_format.json_schema"
            if wanted.json_schema is None:
                raise InvalidRequest(f"{field} is required", param=field)
            yield _schema(wanted.json_schema.schema_, f"{field}.schema")
        if (own := self.structured_outputs) is not None:
            given = [*_texts("structured_outputs.", own.json_, own.regex, own.choice, own.grammar)]
            if own.json_object:
                field = "structured_outputs.json_object"
                given.append(Constraint(GrammarSpec.json_object(), field))
            if not given:
                field = "structured_outputs"
                raise InvalidRequest(f"{field} must have a constraint", param=field)
            yield from given
        yield from _texts(
            "guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )


def _texts(
    prefix: str,
    json: _Schema | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[Constraint]:
    """Yield the given constraints, whose fields have a common prefix."""
    if json is not None:
        yield _schema(json, f"{prefix}json")
    if regex is not None:
        yield Constraint(GrammarSpec(GrammarKind.REGEX, regex), f"{prefix}regex")
    if choice is not None:
        yield Constraint(choice_constraint(choice), f"{prefix}choice")
    if grammar is not None:
        yield Constraint(GrammarSpec(GrammarKind.GRAMMAR, grammar), f"{prefix}grammar")


def _schema(schema: _Schema, field: str) -> Constraint:
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    return Constraint(GrammarSpec(GrammarKind.JSON_SCHEMA, text), field)
