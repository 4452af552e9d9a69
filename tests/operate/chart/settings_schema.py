"""JSON schemas of the services' settings, which the chart's values accept under `settings`.

`python -m tests.operate.chart.settings_schema` writes them into ``values.schema.json``.
"""

import json
import re
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from services.common.settings import ServiceSettings
from services.decode.settings import DecodeSettings
from services.encoder.settings import EncoderSettings
from services.gateway.settings import GatewaySettings
from services.prefill.settings import PrefillSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings

CHART = Path(__file__).parents[3] / "helm" / "headrace"
SCHEMA = CHART / "values.schema.json"

SETTINGS: dict[str, type[ServiceSettings]] = {
    "defaults": ServiceSettings,
    "workers": WorkerSettings,
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "encoder": EncoderSettings,
}
"""Settings classes by the section of the values that has `settings`."""

MADE_BY_CHART = {
    "advertise",
    "api_keys_file",
    "encoder_model",
    "grpc_port",
    "health_port",
    "host",
    "insecure",
    "metrics_port",
    "model",
    "port",
    "reuse_port",
    "routers",
    "served_encoder_name",
    "served_model_name",
    "transfer_interface",
    "transfer_ports",
    "worker_id",
}
"""Settings that follow from other values of the chart."""

_KEPT = {
    "anyOf",
    "description",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "items",
    "maxItems",
    "maxLength",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "multipleOf",
    "pattern",
    "type",
}

_RE2 = re.compile(r"(?!.*\(\?)(?!.*[0-9]{4}).*")
"""Patterns that Helm supports: without lookahead, and with less than 1,000 repetitions.

The services check the others when they start."""
_WIDTH = 110


def settings_schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of the settings of each section; other keys are refused."""
    return {f"settings-{section}": _schema(settings) for section, settings in SETTINGS.items()}


def is_value(name: str, field: FieldInfo) -> bool:
    """Return whether a setting can be a value of the chart.

    Settings with an alias, such as the cluster token, have one variable for all services.
    """
    return name not in MADE_BY_CHART and field.validation_alias is None


def _schema(settings: type[ServiceSettings]) -> dict[str, Any]:
    full = settings.model_json_schema(by_alias=False)
    properties = {
        name: _plain(full["properties"][name], full.get("$defs", {}))
        for name, field in sorted(settings.model_fields.items())
        if is_value(name, field)
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _plain(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a property's schema without references, titles and defaults."""
    if reference := schema.get("$ref"):
        named = definitions[reference.rpartition("/")[2]]
        schema = {**named, **{key: value for key, value in schema.items() if key != "$ref"}}
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    kept = {key: value for key, value in schema.items() if key in _KEPT}
    if "anyOf" in kept:
        kept["anyOf"] = [_plain(option, definitions) for option in kept["anyOf"]]
    if "items" in kept:
        kept["items"] = _plain(kept["items"], definitions)
    if "pattern" in kept and not _RE2.fullmatch(kept["pattern"]):
        del kept["pattern"]
    return kept


def written(schema: object, margin: int = 0) -> str:
    """Return the text of a schema. What fits into a line is written in one."""
    line = json.dumps(schema, ensure_ascii=False)
    if margin + len(line) <= _WIDTH or not isinstance(schema, dict | list) or not schema:
        return line
    space = "\n" + " " * (margin + 2)
    if isinstance(schema, dict):
        parts = [f"{json.dumps(key)}: {written(schema[key], margin + 2)}" for key in schema]
        return "{" + space + f",{space}".join(parts) + space[:-2] + "}"
    parts = [written(item, margin + 2) for item in schema]
    return "[" + space + f",{space}".join(parts) + space[:-2] + "]"


def main() -> None:
    """Write the schemas of the settings into the chart's schema."""
    schema = json.loads(SCHEMA.read_text())
    schema["definitions"].update(settings_schemas())
    SCHEMA.write_text(written(schema) + "\n")


if __name__ == "__main__":
    main()
