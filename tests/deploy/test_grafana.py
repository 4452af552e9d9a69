"""Dashboards are complete and can be imported into any Grafana."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.expressions import DASHBOARDS, DEPLOY, panels

NEWEST_SCHEMA = 39
"""Grafana 11 reads this schema, and later versions migrate from it."""
PROVISIONED = "/etc/grafana/provisioning/"


def datasources(value: Any) -> list[Any]:
    """Return every data source in a part of a dashboard."""
    if isinstance(value, list):
        return [found for item in value for found in datasources(item)]
    if not isinstance(value, dict):
        return []
    own = [value["datasource"]] if "datasource" in value else []
    return own + [found for item in value.values() for found in datasources(item)]


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_there_is_a_dashboard() -> None:
    assert DASHBOARDS


def test_data_source_is_always_the_variable(dashboard: Path) -> None:
    content = json.loads(dashboard.read_text())
    found = datasources(content)
    assert len(found) > 10
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in found)
    assert content["templating"]["list"][0]["name"] == "datasource"
    assert content["schemaVersion"] <= NEWEST_SCHEMA
    assert "id" not in content  # belongs to one Grafana


def test_panels_have_texts_and_units_and_do_not_overlap(dashboard: Path) -> None:
    found = panels(dashboard)
    every = json.loads(dashboard.read_text())["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    for panel in found:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
    places = [panel["gridPos"] for panel in every]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_series_of_a_panel_have_distinct_legends(dashboard: Path) -> None:
    for panel in panels(dashboard):
        legends = [target.get("legendFormat", "") for target in panel["targets"]]
        assert len(set(legends)) == len(legends), panel["title"]


def test_provisioning_finds_the_dashboards_and_prometheus() -> None:
    provider = yaml.safe_load((DEPLOY / "grafana/dashboards/headrace.yaml").read_text())
    path = provider["providers"][0]["options"]["path"]
    assert path.startswith(PROVISIONED)
    folder = DEPLOY / "grafana" / path.removeprefix(PROVISIONED)
    assert sorted(folder.glob("*.json")) == DASHBOARDS
    sources = yaml.safe_load((DEPLOY / "grafana/datasources/prometheus.yaml").read_text())
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    interval = sources["datasources"][0]["jsonData"]["timeInterval"]
    assert interval == scrape["global"]["scrape_interval"]
