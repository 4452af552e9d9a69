"""deploy/README.md and TROUBLESHOOTING.md: settings, alerts, and the worked example."""

import re
from importlib import import_module

import pytest
import yaml
from typer.testing import CliRunner

from services.cli import app
from services.launch import SERVICES
from services.router.capacity import WorkerHealth
from tests.deploy.images import DEPLOY

SERVICES_FOLDER = DEPLOY.parent / "services"
README = (DEPLOY / "README.md").read_text()
TROUBLESHOOTING = (DEPLOY / "TROUBLESHOOTING.md").read_text()
TEXT = README + TROUBLESHOOTING
NOT_SETTINGS = {
    "credentials_file",
    "failed_rank",
    "inter_token_s",
    "not_ready",
    "nr_throttled",
    "page_bytes",
    "page_plans",
    "request_id",
    "shm_size",
}
COMMANDS = ("docker ", "headrace ", "kubectl ", "make ")
NOT_EVENTS = {"codec auto", "ping timeout"}  # a setting, and a message of gRPC


def settings() -> set[str]:
    classes = (
        getattr(import_module(f"services.{name}.settings"), found)
        for name, found in SERVICES.items()
    )
    return {field for found in classes for field in found.model_fields}


def test_each_alert_has_a_section() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    alerts = [
        rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule
    ]
    assert alerts
    assert re.findall(r"^## (Headrace.+)$", TROUBLESHOOTING, re.MULTILINE) == alerts


def test_each_state_of_a_worker_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", TROUBLESHOOTING, re.MULTILINE)
    assert set(rows) == {state.value for state in WorkerHealth}


def test_named_settings_exist() -> None:
    """Each name with an underscore that is not a metric is a setting of a service."""
    names = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", TEXT))
    metrics = {name for name in names if name.startswith("headrace_")}
    assert names - metrics - NOT_SETTINGS <= settings()
    assert {"kv_format", "overflow_tokens"} <= names


def test_named_log_events_exist() -> None:
    """Each phrase of words in code font that is not a command is an event that a service logs."""
    phrases = set(re.findall(r"`([A-Za-z]+(?: [a-z]+)+)`", TEXT.replace("\n", " ")))
    events = {phrase for phrase in phrases if not phrase.startswith(COMMANDS)} - NOT_EVENTS
    assert {"process hangs", "API keys not reloaded"} <= events
    source = "\n".join(file.read_text() for file in SERVICES_FOLDER.rglob("*.py"))
    assert not {event for event in events if f'"{event}' not in source}


def test_worked_example_of_sizing_prints_what_the_readme_shows() -> None:
    command, shown = re.search(r"\$ headrace (size .+)\n((?:    .+\n)+)", README).groups()  # type: ignore[union-attr]
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    printed = {" ".join(line.split()) for line in result.stdout.splitlines()}
    for line in shown.splitlines():
        assert " ".join(line.split()) in printed
    slower = re.sub(r"--link \S+", "--link 4.8", command)
    assert slower != command
    assert "expected with 30 + 30" in CliRunner().invoke(app, slower.split()).stdout


@pytest.mark.parametrize("flavor", ["cpu", "cuda", "control"])
def test_each_image_is_described(flavor: str) -> None:
    assert f"`{flavor}`" in README
