"""The images `control` and `cpu` are built without a daemon, are small, and serve together."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.deploy.images import environment
from tests.operate.containers import Buildah, missing
from tests.ports import free_port

pytestmark = [pytest.mark.operate, pytest.mark.timeout(3600)]

MOST_BYTES = {"control": 400e6, "cpu": 1.5e9}
ROLES = {"router": "control", "gateway": "control", "prefill": "cpu", "decode": "cpu"}
START_S = 300.0
USER = 10001


@pytest.fixture(scope="module")
def buildah() -> Buildah:
    if reason := missing():
        pytest.skip(reason)
    return Buildah()


@pytest.fixture(scope="module")
def images(buildah: Buildah) -> dict[str, str]:
    """Names of the images by flavor."""
    return {flavor: buildah.build(flavor) for flavor in MOST_BYTES}


@pytest.mark.parametrize("flavor", MOST_BYTES)
def test_image_is_small(buildah: Buildah, images: dict[str, str], flavor: str) -> None:
    assert buildah.size(images[flavor]) <= MOST_BYTES[flavor]


@pytest.mark.parametrize("flavor", MOST_BYTES)
def test_image_has_the_configuration_of_the_dockerfile(
    buildah: Buildah, images: dict[str, str], flavor: str
) -> None:
    config = buildah.config(images[flavor])
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"] == ["headrace"]
    assert "http://127.0.0.1:9091/health" in config["Healthcheck"]["Test"][-1]
    named = {name: value for name, value in environment().items() if "HEADRACE" in name}
    assert {f"{name}={value}" for name, value in named.items()} <= set(config["Env"])


def test_services_in_their_images_answer_a_chat_as_an_ordinary_user(
    buildah: Buildah, images: dict[str, str], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(deployment(buildah, images, tmp_path))
        client = stack.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=120))
        question = "What is the capital of France? Answer with one word."
        answer = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": question}], "temperature": 0},
        )
        assert answer.status_code == httpx.codes.OK, answer.text
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]


@contextmanager
def deployment(buildah: Buildah, images: dict[str, str], folder: Path) -> Iterator[str]:
    """Run all services, each in a container, and yield the URL of the gateway once it is ready."""
    ports = {name: free_port() for name in ("router", "gateway", "grpc", "prefill", "decode")}
    logs = {role: folder / f"{role}.log" for role in ROLES}
    with ExitStack() as stack:
        for role, flavor in ROLES.items():
            container = stack.enter_context(buildah.container(images[flavor]))
            given = variables(role, ports)
            process = buildah.process(container, ["headrace", role], given, logs[role])
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        url = f"http://127.0.0.1:{ports['gateway']}"
        wait_until_ready(url, logs)
        services = {
            process.cmdline()[2]: process.uids().real
            for process in psutil.Process().children(recursive=True)
            if process.cmdline()[1:2] == ["/opt/headrace/bin/headrace"]
        }
        assert services == dict.fromkeys(ROLES, USER)
        yield url


def variables(role: str, ports: dict[str, int]) -> dict[str, str]:
    """Return the environment of a service on loopback, with free ports."""
    prefix = f"HEADRACE_{role.upper()}"
    given = {
        "HEADRACE_CLUSTER_TOKEN": "between-us",
        "OMP_NUM_THREADS": "1",
        f"{prefix}_PORT": str(ports[role]),
        f"{prefix}_HEALTH_PORT": "0",
    }
    if role != "router":
        given[f"{prefix}_ROUTERS"] = json.dumps([f"http://127.0.0.1:{ports['router']}"])
    if role == "gateway":
        given[f"{prefix}_GRPC_PORT"] = str(ports["grpc"])
    return given


def wait_until_ready(url: str, logs: dict[str, Path]) -> None:
    deadline = time.monotonic() + START_S
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        while time.monotonic() < deadline:
            try:
                if client.get("/ready").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
    shown = (f"{role}: {log.read_text()[-2000:]}" for role, log in logs.items())
    raise AssertionError("the gateway is not ready\n" + "\n".join(shown))
