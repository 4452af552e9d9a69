"""The schema of the chart's values knows the services' settings, and refuses everything else."""

import json
from collections.abc import Iterator
from typing import Any

from services.decode.settings import DecodeSettings
from tests.operate.chart.settings_schema import (
    MADE_BY_CHART,
    SCHEMA,
    SETTINGS,
    is_value,
    settings_schemas,
    written,
)


def objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part of a schema that describes an object with named properties."""
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("type") == "object":
            yield path, schema
        for key, value in schema.items():
            yield from objects(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from objects(value, f"{path}/{number}")


def test_schema_has_the_settings_of_the_services() -> None:
    schema = json.loads(SCHEMA.read_text())
    found = {name: schema["definitions"][name] for name in settings_schemas()}
    assert found == settings_schemas(), "run `python -m tests.operate.chart.settings_schema`"


def test_schema_is_written_in_its_format() -> None:
    text = SCHEMA.read_text()
    assert text == written(json.loads(text)) + "\n"


def test_every_object_refuses_unknown_keys() -> None:
    parts = list(objects(json.loads(SCHEMA.read_text())))
    assert len(parts) > 50
    assert [path for path, part in parts if part.get("additionalProperties") is not False] == []


def test_settings_that_the_chart_makes_are_settings() -> None:
    known = {name for settings in SETTINGS.values() for name in settings.model_fields}
    assert known >= MADE_BY_CHART


def test_secrets_and_ports_are_not_values() -> None:
    values = {name for name, field in DecodeSettings.model_fields.items() if is_value(name, field)}
    assert values.isdisjoint({"cluster_token", "tls_key_file", "port", "routers", "worker_id"})
    assert values >= {"drain_s", "kv_format", "colocated"}
