"""PromQL expressions of the rules and dashboards in ``deploy/``, and what they select."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
RULES = DEPLOY / "prometheus/rules.yaml"

_SELECTOR = re.compile(r"\b((?:headrace|process|up|ALERTS)[a-zA-Z0-9_:]*)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|ignoring|without|group_left)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Selector:
    """A metric name and its label matchers: name, operator and value of each."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expression: str) -> list[Selector]:
    """Return the selectors of an expression."""
    return [
        Selector(name, tuple(_MATCHER.findall(matchers)))
        for name, matchers in _SELECTOR.findall(expression)
    ]


def grouping_labels(expression: str) -> set[str]:
    """Return the labels by which an expression aggregates or joins."""
    names = (name.strip() for names in _GROUPING.findall(expression) for name in names.split(","))
    return {name for name in names if name}


def rules() -> list[dict[str, Any]]:
    """Return all alerts and recording rules."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Return all alerts."""
    return [rule for rule in rules() if "alert" in rule]


def panels(dashboard: Path) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, without the headings of its rows."""
    found = json.loads(dashboard.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """Yield (panel and series, expression) for all dashboards."""
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield f"{panel['title']}: {target.get('legendFormat', '')}", target["expr"]
