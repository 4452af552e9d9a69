"""Processes of a local deployment: their number, their ports and their GPUs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.parallel.partition import MAX_RANKS
from services.common.errors import SettingsError
from services.decode.settings import DecodeSettings
from services.encoder.settings import EncoderSettings
from services.gateway.settings import GatewaySettings
from services.local.artifacts import Artifacts
from services.local.options import UpOptions
from services.local.processes import plan_processes
from services.local.supervisor import stop_s
from services.prefill.settings import PrefillSettings
from services.worker.settings import WorkerSettings

pytestmark = pytest.mark.slow

ARTIFACTS = Artifacts(Path("model"), Path("model"), None, "model")


def gpus_of(options: UpOptions) -> dict[str, str | None]:
    specs = plan_processes(options, ARTIFACTS, "token")
    return {spec.name: spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in specs}


def test_every_gateway_and_worker_knows_every_router() -> None:
    options = UpOptions(port=1000, grpc_port=1001, router_port=1002, gateways=2, routers=2)
    options.check()
    specs = {spec.name: spec for spec in plan_processes(options, ARTIFACTS, "token")}
    names = {"router", "router-1", "gateway", "gateway-1", "prefill-0", "decode-0"}
    assert specs.keys() == names
    assert [specs[name].arguments[-1] for name in ("router", "router-1")] == ["1002", "1003"]
    routers = ["http://127.0.0.1:1002", "http://127.0.0.1:1003"]
    for name in names - {"router", "router-1"}:
        arguments = specs[name].arguments
        given = [arguments[at + 1] for at, flag in enumerate(arguments) if flag == "--routers"]
        assert given == routers
    assert specs["gateway"].arguments == specs["gateway-1"].arguments
    assert "--reuse-port" in specs["gateway"].arguments
    assert "--reuse-port" not in plan_processes(UpOptions(), ARTIFACTS, "token")[1].arguments


def test_ports_of_all_routers_must_be_free_of_the_gateway() -> None:
    with pytest.raises(SettingsError, match="must differ"):
        UpOptions(port=1003, grpc_port=1001, router_port=1002, routers=2).check()


def test_workers_share_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-ab")
    assert gpus_of(UpOptions(prefill=2, decode=1)) == {
        "router": None,
        "gateway": None,
        "prefill-0": "3",
        "prefill-1": "GPU-ab",
        "decode-0": "3",
    }


def test_services_may_stop_for_as_long_as_their_settings_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_GATEWAY_DRAIN_S", "120")
    monkeypatch.setenv("HEADRACE_DECODE_DRAIN_S", "soon")  # which the service refuses
    specs = plan_processes(UpOptions(), ARTIFACTS, "token")
    assert {spec.name: spec.grace_s for spec in specs} == {
        "router": 35,
        "gateway": 125,
        "prefill-0": 35,
        "decode-0": 35,
    }
    assert stop_s(specs) > 120 + 30


def test_workers_on_one_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three workers share a GPU, and an environment variable overrides the share of one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("HEADRACE_PREFILL_GPU_MEMORY_UTILIZATION", raising=False)
    monkeypatch.setenv("HEADRACE_DECODE_GPU_MEMORY_UTILIZATION", "0.3")
    specs = plan_processes(UpOptions(prefill=2, decode=1), ARTIFACTS, "token")
    shares = {
        spec.name: value
        for spec in specs
        for name, value in spec.environment.items()
        if name.endswith("_GPU_MEMORY_UTILIZATION")
    }
    assert shares == {"prefill-0": "0.450", "prefill-1": "0.900", "decode-0": "0.3"}


def test_workers_get_the_ranks_and_the_gpus_of_their_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,GPU-ab,GPU-cd")
    options = UpOptions(prefill=2, prefill_tp=1, decode_tp=4)
    assert gpus_of(options) == {
        "router": None,
        "gateway": None,
        "prefill-0": "4",
        "prefill-1": "5",
        "decode-0": "6,7,GPU-ab,GPU-cd",
    }


def test_ranks_on_the_cpu_need_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = UpOptions(device="cpu", prefill_tp=3, decode_tp=MAX_RANKS)
    found = {}
    for spec in plan_processes(options, ARTIFACTS, "token"):
        if spec.service in ("prefill", "decode"):
            assert "CUDA_VISIBLE_DEVICES" not in spec.environment
            assert spec.environment["OMP_NUM_THREADS"] == "1"
            settings = PrefillSettings if spec.service == "prefill" else DecodeSettings
            loaded = settings.load(list(spec.arguments))
            assert isinstance(loaded, WorkerSettings)
            found[spec.name] = loaded.tp
    assert found == {"prefill-0": 3, "decode-0": MAX_RANKS}


def test_workers_get_the_kv_format_and_the_share_of_eviction() -> None:
    options = UpOptions(kv_format="fdc:/a b/kv.safetensors", kv_eviction=0.5)
    specs = plan_processes(options, ARTIFACTS, "token")
    workers = [spec for spec in specs if spec.service in ("prefill", "decode")]
    assert len(workers) == 2
    for spec in workers:
        settings = PrefillSettings if spec.service == "prefill" else DecodeSettings
        found = settings.load(list(spec.arguments))
        assert isinstance(found, WorkerSettings)
        assert found.kv_format == "fdc:/a b/kv.safetensors"
        assert found.kv_eviction == 0.5


@pytest.mark.parametrize(("device", "visible"), [("auto", ""), ("cpu", "0,1")])
def test_no_gpu_is_assigned_without_visible_gpus_or_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert set(gpus_of(UpOptions(device=device)).values()) == {None}


def test_fixed_health_port_belongs_to_the_first_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container image sets the same port for every service."""

    def health_ports() -> dict[str, str | None]:
        return {
            spec.name: spec.environment.get(
                f"HEADRACE_{spec.name.split('-')[0].upper()}_HEALTH_PORT"
            )
            for spec in plan_processes(options, ARTIFACTS, "token")
        }

    options = UpOptions(gateways=2, prefill=2)
    assert set(health_ports().values()) == {None}
    for service in ("GATEWAY", "ROUTER", "PREFILL", "DECODE"):
        monkeypatch.setenv(f"HEADRACE_{service}_HEALTH_PORT", "9091")
    assert health_ports() == {
        "router": "0",
        "gateway": None,  # inherited
        "gateway-1": "0",
        "prefill-0": "0",
        "prefill-1": "0",
        "decode-0": "0",
    }


def test_second_cluster_token_of_the_environment_is_accepted_unless_there_is_no_token() -> None:
    with_token = plan_processes(UpOptions(), ARTIFACTS, "token")
    assert not [spec for spec in with_token if "HEADRACE_SECOND_CLUSTER_TOKEN" in spec.environment]
    with_tls = plan_processes(UpOptions(tls_dir=Path("tls")), ARTIFACTS, "")
    assert {spec.environment["HEADRACE_SECOND_CLUSTER_TOKEN"] for spec in with_tls} == {""}


def test_encoder_workers_are_started_beside_the_model() -> None:
    artifacts = replace(ARTIFACTS, encoder=Path("minilm"), encoder_name="small-encoder")
    options = UpOptions(encoder="minilm", encoders=2)
    options.check()
    specs = {spec.name: spec for spec in plan_processes(options, artifacts, "token")}
    assert {"encoder-0", "encoder-1", "prefill-0", "decode-0"} <= specs.keys()
    for name in ("encoder-0", "encoder-1"):
        settings = EncoderSettings.load(specs[name].arguments, program="test")
        assert (settings.worker_id, settings.model) == (name, "minilm")
        assert settings.served_model_name == "small-encoder"
    gateway = GatewaySettings.load(specs["gateway"].arguments, program="test")
    assert (gateway.model, gateway.encoder_model) == ("model", "minilm")
    assert gateway.served_encoder_name == "small-encoder"


def test_encoder_alone_needs_no_other_workers() -> None:
    encoder = Path("minilm")
    artifacts = Artifacts(encoder, encoder, None, "minilm", encoder, "minilm")
    options = UpOptions(model="none", encoder="minilm")
    options.check()
    specs = {spec.name: spec for spec in plan_processes(options, artifacts, "token")}
    assert specs.keys() == {"router", "gateway", "encoder-0"}
    gateway = GatewaySettings.load(specs["gateway"].arguments, program="test")
    assert (gateway.model, gateway.encoder_model) == ("none", "minilm")


def test_encoder_worker_gets_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    found = gpus_of(UpOptions(encoder="minilm"))
    assert (found["prefill-0"], found["decode-0"], found["encoder-0"]) == ("0", "1", "2")


@pytest.mark.parametrize("options", [{}, {"encoder": "minilm", "keep": 0.5}])
def test_deployment_without_a_model_needs_an_encoder(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="--model none"):
        UpOptions(model="none", **options).check()
