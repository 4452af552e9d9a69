"""A deployment exports all metrics and labels that rules and dashboards name."""

import math
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.deploy.expressions import (
    Selector,
    dashboard_expressions,
    grouping_labels,
    rules,
    selectors,
)
from tests.harness.deployment import Running, deployed
from tests.harness.encoders import ENCODER, needs_encoder
from tests.operate.debian import Unpacked, unpack
from tests.operate.prometheus import SOURCE, Prometheus, configure, serving

pytestmark = [pytest.mark.operate, pytest.mark.timeout(900), needs_encoder]

COLLECT_S = 240.0
"""Time in which all expressions must have data: two scrapes, 15 s apart, and a busy machine."""
LATE_S = 90.0
"""Time after which an alert that one late heartbeat or scrape has made pending has ended."""
RATE_INTERVAL = "1m"
"""Grafana's $__rate_interval: four times the scrape interval."""
FREE_VALUES = {"endpoint", "status"}
"""Labels whose values depend on what has happened."""
MAY_BE_PENDING = {"HeadraceTtftBurnFast", "HeadraceTtftBurnSlow"}
"""Alerts that may be pending on a busy machine."""


@pytest.fixture(scope="module")
def package() -> Unpacked:
    return unpack("prometheus")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with deployed("--encoder", ENCODER) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def prometheus(
    package: Unpacked, running: Running, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Prometheus that has scraped the deployment under traffic, until everything has data."""
    addresses = {
        name.partition("-")[0]: [urlsplit(url).netloc.rpartition("@")[2]]
        for name, url in running.metrics_urls().items()
    }
    state = running.state
    addresses["router"] = [f"{state.host}:{state.router_port}"]
    config = configure(tmp_path_factory.mktemp("prometheus"), addresses, state.cluster_token)
    with serving(package, config) as server, traffic(running):
        deadline = time.monotonic() + COLLECT_S
        while time.monotonic() < deadline and without_data(server):
            time.sleep(2.0)
        yield server


@contextmanager
def traffic(running: Running) -> Iterator[None]:
    """Send one request after another until the block ends."""
    end = threading.Event()
    failures: list[str] = []

    def send() -> None:
        with httpx.Client(base_url=running.url, trust_env=False, timeout=120) as client:
            number = 0
            while not end.wait(0.5):
                number += 1
                prompt = f"Sentence {number} is about rivers, turbines and reservoirs. " * 20
                body = {"model": running.model, "prompt": prompt, "max_tokens": 8}
                if number % 2:  # constraints that are not known from earlier requests
                    body["guided_choice"] = [f"river {number}", "turbine"]
                answers = [
                    client.post("/v1/completions", json=body),
                    client.post(
                        "/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": prompt}
                    ),
                ]
                failures.extend(a.text for a in answers if a.status_code != httpx.codes.OK)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        end.set()
        sender.join()
    assert not failures


OF_SECRET_FILES = "headrace_secret_files_"
"""Prefix of metrics that exist only with API keys or mutual TLS, which this deployment lacks."""
OF_EVERY_PROCESS = (
    *("headrace_build_info", "headrace_disk_", "headrace_write_failures_"),
    *(OF_SECRET_FILES, "headrace_second_cluster_token_calls_"),
)
"""Prefixes of metrics of processes, which no query sums over components."""


def without_data(prometheus: Prometheus) -> dict[str, str]:
    """Return the expressions of dashboards and recording rules that have no number."""
    wanted = {
        name: re.sub(
            r"\$(namespace|release)", ".*", text.replace("$__rate_interval", RATE_INTERVAL)
        )
        for name, text in dashboard_expressions()
    }
    wanted |= {rule["record"]: rule["record"] for rule in rules() if "record" in rule}
    return {
        name: expression
        for name, expression in wanted.items()
        if not any(math.isfinite(value) for value in prometheus.values(expression))
    }


def missing(prometheus: Prometheus, selector: Selector) -> list[str]:
    """Return the metric, labels and values of a selector that no series has."""
    if not prometheus.query(selector.metric):
        return [selector.metric]
    asked = {}
    for label, operator, value in selector.matchers:
        asked[label] = f'{selector.metric}{{{label}!=""}}'
        if label in FREE_VALUES:
            continue
        for one in value.split("|") if "~" in operator else [value]:
            asked[f"{label}={one}"] = f'{selector.metric}{{{label}="{one}"}}'
    return [
        f"{selector.metric} with {what}"
        for what, expression in asked.items()
        if not prometheus.query(expression)
    ]


def test_configuration_is_valid(package: Unpacked, tmp_path: Path) -> None:
    components = ("gateway", "router", "prefill", "decode")
    config = configure(tmp_path, {name: [f"{name}:9090"] for name in components}, "token")
    for arguments in (["config", str(config)], ["config", "--syntax-only", SOURCE / config.name]):
        promtool(package, "check", *arguments)


def test_rules_are_valid_and_pass_their_unit_tests(package: Unpacked) -> None:
    promtool(package, "check", "rules", "--lint-fatal", SOURCE / "rules.yaml")
    promtool(package, "test", "rules", SOURCE / "rules_test.yaml")


def promtool(package: Unpacked, *arguments: str | Path) -> None:
    """Run promtool, and fail with its output if it finds a fault."""
    done = subprocess.run(
        [package.program("promtool"), *arguments],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=package.environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


def test_all_targets_are_scraped(prometheus: Prometheus) -> None:
    targets = prometheus.targets()
    assert {target["labels"]["component"]: target["health"] for target in targets} == dict.fromkeys(
        ("gateway", "router", "prefill", "decode", "encoder"), "up"
    ), [target["lastError"] for target in targets]


def test_labels_of_targets_and_metrics_do_not_collide(prometheus: Prometheus) -> None:
    assert not [label for label in prometheus.get("labels") if label.startswith("exported_")]


def test_every_expression_has_data_after_traffic(prometheus: Prometheus) -> None:
    assert without_data(prometheus) == {}


def test_rules_name_metrics_labels_and_values_that_exist(prometheus: Prometheus) -> None:
    for rule in rules():
        named = selectors(rule["expr"])
        assert named, rule["expr"]
        if all(selector.metric.startswith(OF_SECRET_FILES) for selector in named):
            continue
        assert [what for selector in named for what in missing(prometheus, selector)] == []
        for label in grouping_labels(rule["expr"]):
            having = [s for s in named if prometheus.query(f'{s.metric}{{{label}!=""}}')]
            assert having, f"no metric of {rule['expr']} has the label {label}"


def test_no_alert_is_active_in_a_healthy_deployment(prometheus: Prometheus) -> None:
    known = {rule["alert"] for rule in rules() if "alert" in rule}
    loaded = prometheus.get("rules", type="alert")["groups"]
    assert {rule["name"] for group in loaded for rule in group["rules"]} == known
    assert all(rule["health"] == "ok" for group in loaded for rule in group["rules"])
    deadline = time.monotonic() + LATE_S
    while (active := active_alerts(prometheus) - MAY_BE_PENDING) and time.monotonic() < deadline:
        time.sleep(2.0)
    assert not active


def active_alerts(prometheus: Prometheus) -> set[str]:
    return {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}


def test_sums_over_a_deployment_count_once(prometheus: Prometheus) -> None:
    """One component exports a metric, or prefill and decode workers do, or all workers."""
    shared = prometheus.query(
        'count by (__name__) (count by (__name__, component) ({__name__=~"headrace_.*"})) > 1'
    )
    names = {sample["metric"]["__name__"] for sample in shared}
    assert "headrace_queue_tokens" in names
    for name in {name for name in names if not name.startswith(OF_EVERY_PROCESS)}:
        components = prometheus.query(f"count by (component) ({name})")
        found = {sample["metric"]["component"] for sample in components}
        assert found - {"encoder"} == {"prefill", "decode"}, name
