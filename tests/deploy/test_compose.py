"""deploy/compose.yaml: every flag, variable, port and file in it exists."""

import re
from importlib import import_module
from typing import Any

import pytest
import yaml

from services.common.settings import ServiceSettings
from services.launch import SERVICES
from tests.deploy.images import DEPLOY, FLAVORS, environment

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OURS = {
    name: service
    for name, service in COMPOSE["services"].items()
    if service["image"].startswith("headrace:")
}
GIVEN = {"HEADRACE_CLUSTER_TOKEN": "between-us"}


def interpolate(value: object) -> str:
    """Replace ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?message}``."""

    def replace(found: re.Match[str]) -> str:
        name, operator, word = found.groups()
        if name in GIVEN:
            return GIVEN[name]
        assert operator == ":-", f"{name} has no value"
        return word

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", replace, str(value))


def settings_of(role: str) -> type[ServiceSettings]:
    found: type[ServiceSettings] = getattr(
        import_module(f"services.{role}.settings"), SERVICES[role]
    )
    return found


def variables_of(role: str) -> set[str]:
    """Return the names of all environment variables that a service reads."""
    settings = settings_of(role)
    names = set()
    for name, field in settings.model_fields.items():
        aliases = getattr(field.validation_alias, "choices", None)
        names |= set(aliases) if aliases else {f"HEADRACE_{role.upper()}_{name.upper()}"}
    return names


@pytest.mark.parametrize("name", OURS)
def test_environment_and_flags_are_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = OURS[name]
    role, *flags = service["command"]
    given = {key: interpolate(value) for key, value in service["environment"].items()}
    of_image = {key: value for key, value in environment().items() if f"_{role.upper()}_" in key}
    assert {key for key in given if key.startswith("HEADRACE_")} <= variables_of(role)
    for key, value in (of_image | given).items():
        monkeypatch.setenv(key, value)
    settings = settings_of(role).load(flags)
    assert settings.token == GIVEN["HEADRACE_CLUSTER_TOKEN"]
    assert settings.host == "0.0.0.0"
    for key, value in given.items():
        field = key.removeprefix(f"HEADRACE_{role.upper()}_").lower()
        if field in settings_of(role).model_fields and not value.startswith("["):
            assert str(getattr(settings, field) or "") == value


def test_gateway_without_keys_refuses_names_of_web_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in OURS["gateway"]["environment"].items():
        monkeypatch.setenv(key, interpolate(value))
    check = settings_of("gateway").load([]).host_check(authenticated=False)
    assert check is not None
    assert check.refusal(["evil.example:8000"])
    for name in ("gateway:8000", "localhost:8000", "127.0.0.1:8000", "192.168.1.7:8000"):
        assert check.refusal([name]) is None


def test_services_find_one_another() -> None:
    routers = [
        interpolate(value)
        for service in OURS.values()
        for key, value in service["environment"].items()
        if key.endswith("_ROUTERS")
    ]
    port = settings_of("router").model_fields["port"].default
    assert routers == [f'["http://router:{port}"]'] * 4
    assert COMPOSE["services"]["router"]["command"] == ["router"]


def test_published_ports_are_ports_of_the_services() -> None:
    for name, service in OURS.items():
        settings = settings_of(name).model_fields
        ports = {settings[field].default for field in ("port", "grpc_port") if field in settings}
        published = [interpolate(port) for port in service.get("ports", [])]
        assert all(port.startswith("127.0.0.1:") for port in published)
        assert {int(port.rsplit(":", 1)[1]) for port in published} <= ports


@pytest.mark.parametrize("name", OURS)
def test_containers_are_restricted(name: str) -> None:
    service = OURS[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert f"{name}-cache:/cache" in service["volumes"]
    assert service["build"]["args"]["FLAVOR"] in FLAVORS
    assert service["image"] == f"headrace:{service['build']['args']['FLAVOR']}"
    drain = settings_of(service["command"][0]).model_fields["drain_s"].default
    assert int(service["stop_grace_period"].removesuffix("s")) > drain


def test_services_share_no_volume_that_they_can_write() -> None:
    """Caches contain compiled code, which would run in the other services."""
    writable = [
        volume.partition(":")[0]
        for service in COMPOSE["services"].values()
        for volume in map(interpolate, service.get("volumes", []))
        if not volume.endswith(":ro")
    ]
    assert len(writable) == len(set(writable)) > 4


def test_mounted_files_exist() -> None:
    mounts = [
        interpolate(volume)
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", [])
    ]
    folders = [mount.partition(":")[0] for mount in mounts if mount.startswith(".")]
    assert folders
    assert all((DEPLOY / folder).is_dir() for folder in folders)
    named = {mount.partition(":")[0] for mount in mounts if not mount.startswith(".")}
    assert named == COMPOSE["volumes"].keys()


def test_healthcheck_of_the_gateway_reads_its_readiness() -> None:
    check: dict[str, Any] = OURS["gateway"]["healthcheck"]
    port = environment()["HEADRACE_GATEWAY_HEALTH_PORT"]
    assert f"http://127.0.0.1:{port}/ready" in check["test"][-1]


def test_prometheus_scrapes_the_metrics_of_every_service() -> None:
    listed = yaml.safe_load((DEPLOY / "prometheus" / "targets.yaml").read_text())
    targets = {entry["labels"]["component"]: entry["targets"] for entry in listed}
    expected = {}
    for name, service in OURS.items():
        if "profiles" in service:
            continue  # it does not always run
        default = settings_of(name).model_fields["port"].default
        port = service["environment"].get(f"HEADRACE_{name.upper()}_METRICS_PORT", default)
        expected[name] = [f"{name}:{port}"]
    assert targets == expected
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())[
        "scrape_configs"
    ]
    (secret,) = COMPOSE["services"]["prometheus"]["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert COMPOSE["secrets"][secret] == {"environment": "HEADRACE_CLUSTER_TOKEN"}
    assert "read_only" not in COMPOSE["services"]["prometheus"], "compose copies the secret into it"
