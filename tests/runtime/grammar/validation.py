"""Validation of JSON values against schemas, with formats."""

from typing import Any

from jsonschema import Draft202012Validator


def faults(value: Any, schema: Any) -> list[str]:
    """Return why a JSON value does not validate against a schema; empty if it does."""
    checker = Draft202012Validator.FORMAT_CHECKER
    validator = Draft202012Validator(schema, format_checker=checker)
    return [error.message for error in validator.iter_errors(value)]
