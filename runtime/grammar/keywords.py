"""Keywords of JSON Schema that several modules read."""

DATA = ("const", "default", "enum", "examples")
"""Keywords whose values are no schemas."""
