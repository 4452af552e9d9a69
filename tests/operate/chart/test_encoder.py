"""Encoder workers in the chart: settings of their pods and of gateways, connections, refusals."""

import pytest

from services.common.model_source import DEFAULT_ENCODER
from services.encoder.settings import EncoderSettings
from services.gateway.settings import GatewaySettings
from tests.operate.chart.manifests import helm, main_container, named, of_kind, pod_of, scenario
from tests.operate.chart.test_wiring import effective, variables
from tests.operate.chart.tools import ToolError

pytestmark = pytest.mark.operate

FOLDER = "/models/encoders/all-MiniLM-L6-v2"


def test_pods_and_gateways_have_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = scenario("encoder", "--set", "encoder.servedName=mini")
    container = main_container(pod_of(manifests, "encoder"))
    settings = effective("encoder", variables(container), monkeypatch)
    assert isinstance(settings, EncoderSettings)
    assert (settings.model, settings.served_model_name) == (FOLDER, "mini")
    assert (settings.port, settings.metrics_port, settings.batch_tokens) == (8003, 9090, 1024)
    assert container["args"] == ["encoder"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert "/models" in mounts
    gateway = main_container(pod_of(manifests, "gateway"))
    found = effective("gateway", variables(gateway), monkeypatch)
    assert isinstance(found, GatewaySettings)
    assert (found.encoder_model, found.served_encoder_name) == (FOLDER, "mini")
    assert found.model != FOLDER


def test_gateways_may_reach_encoder_workers_and_these_reach_routers() -> None:
    manifests = scenario("encoder")
    policies = of_kind(manifests, "NetworkPolicy")
    (own,) = [policy for policy in policies if policy["metadata"]["name"].endswith("-encoder")]
    sources = own["spec"]["ingress"][0]["from"]
    labels = sources[0]["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == "gateway"
    assert own["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 8003}]
    called = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in own["spec"]["egress"]
        for peer in rule.get("to", ())
    ]
    assert called == ["router"]


def test_without_an_encoder_there_are_no_objects_for_it() -> None:
    names = [each["metadata"]["name"] for each in scenario("minimal-cpu")]
    assert not [name for name in names if "encoder" in name]


def test_default_encoder_is_the_packaged_one_beside_any_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifests = scenario("encoder", "--set", "encoder.path=")
    gateway = effective(
        "gateway", variables(main_container(pod_of(manifests, "gateway"))), monkeypatch
    )
    assert isinstance(gateway, GatewaySettings)
    manifests = scenario("minimal-cpu", "--set", "encoder.enabled=true")
    worker = effective(
        "encoder", variables(main_container(pod_of(manifests, "encoder"))), monkeypatch
    )
    assert isinstance(worker, EncoderSettings)
    assert gateway.encoder_model == worker.model == DEFAULT_ENCODER


def test_folder_with_the_name_of_the_packaged_encoder_is_on_the_volume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifests = scenario("encoder", "--set", f"encoder.path={DEFAULT_ENCODER}")
    worker = effective(
        "encoder", variables(main_container(pod_of(manifests, "encoder"))), monkeypatch
    )
    assert isinstance(worker, EncoderSettings)
    assert worker.model == f"/models/{DEFAULT_ENCODER}"


@pytest.mark.parametrize("path", ["minilm", DEFAULT_ENCODER])
def test_folder_without_a_volume_is_refused(path: str) -> None:
    token = "auth.clusterToken.existingSecret=t"
    with pytest.raises(ToolError, match=r"encoder\.path"):
        helm("4.1").render("--set", f"{token},encoder.enabled=true,encoder.path={path}")


def test_encoder_workers_are_autoscaled_by_their_queue() -> None:
    manifests = scenario("encoder", "--set", "encoder.autoscaling.type=keda")
    (scaled,) = of_kind(manifests, "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert "headrace_queue_tokens" in trigger["metadata"]["query"]
    assert named(manifests, "ScaledObject", scaled["metadata"]["name"]) == scaled
