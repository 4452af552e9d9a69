"""Alerts have what an operator needs. `tests/operate` evaluates them with Prometheus."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.expressions import DEPLOY, alerts, dashboard_expressions, rules, selectors
from tests.services.common.test_metrics import SERVICES

ALERTS = {rule["alert"]: rule for rule in alerts()}
UNIT_TESTS = DEPLOY / "prometheus/rules_test.yaml"


def exported_names() -> set[str]:
    """Return the names of all samples that the services export."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {
        family.name + suffix
        for service in SERVICES.values()
        for family in service().collect()
        for suffix in suffixes[family.type]
    }


def firing_samples(alert: str) -> list[str]:
    """Return the series with which the unit tests expect an alert to fire."""
    tests = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    return [
        sample["labels"]
        for test in tests
        for case in test["promql_expr_test"]
        for sample in case.get("exp_samples", ())
        if f'alertname="{alert}"' in sample["labels"]
    ]


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_has_severity_texts_and_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["description"].endswith(".")
    assert rule["annotations"]["runbook"] == f"deploy/TROUBLESHOOTING.md#{alert.lower()}"


@pytest.mark.parametrize("alert", ALERTS)
def test_unit_tests_show_that_alert_fires_and_does_not_fire(alert: str) -> None:
    tests = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    cases = [
        case
        for test in tests
        for case in test["promql_expr_test"]
        if f'alertname="{alert}"' in case["expr"]
    ]
    assert any(case.get("exp_samples") for case in cases)
    assert any(not case.get("exp_samples") for case in cases)


@pytest.mark.parametrize("alert", ALERTS)
def test_annotations_use_labels_that_the_alert_has(alert: str) -> None:
    """Prometheus renders a missing label as an empty string."""
    used = set(re.findall(r"\$labels\.(\w+)", str(ALERTS[alert]["annotations"])))
    for series in firing_samples(alert):
        assert used <= set(re.findall(r"(\w+)=", series))


def test_expressions_use_metrics_that_services_export() -> None:
    known = exported_names() | {"up", "ALERTS"} | {r["record"] for r in rules() if "record" in r}
    expressions = [*(rule["expr"] for rule in rules()), *(e for _, e in dashboard_expressions())]
    used = {selector.metric for expression in expressions for selector in selectors(expression)}
    assert len(used) > 30
    assert used <= known


def test_targets_have_the_labels_that_rules_and_dashboards_read() -> None:
    targets: list[dict[str, Any]] = yaml.safe_load(
        Path(DEPLOY / "prometheus/targets.yaml").read_text()
    )
    components = [group["labels"]["component"] for group in targets]
    assert components == ["gateway", "router", "prefill", "decode"]
    assert all(group["labels"]["namespace"] for group in targets)
    assert all(group["labels"]["release"] for group in targets)
