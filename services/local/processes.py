"""Processes of a local deployment, with their flags and environment."""

import os
from dataclasses import replace
from pathlib import Path

from services.common.addresses import bracketed
from services.common.settings import ServiceSettings
from services.common.tls import TlsFiles
from services.local.artifacts import Artifacts
from services.local.gpus import WorkerGpus, assign_gpus, visible_gpus
from services.local.options import UpOptions, WorkerOptions
from services.local.supervisor import ProcessSpec

_END_S = 5.0
"""Time in which a service ends after its requests, seconds."""


def plan_processes(options: UpOptions, artifacts: Artifacts, token: str) -> list[ProcessSpec]:
    """Return the processes of a deployment: routers, gateways and workers.

    Args:
        options: options of the deployment.
        artifacts: files that the processes read.
        token: cluster token, the shared secret between the services; empty with mutual TLS.
    """
    common = {
        "HEADRACE_CLUSTER_TOKEN": token,
        **_tls(options.tls_dir),
        # Several threads per rank are slower if there are more ranks than cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
        # Huge pages for weights make a decode step, which reads all weights, 8 % faster.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    scheme = "https" if options.tls_dir else "http"
    routers = [f"{scheme}://{bracketed(options.host)}:{port}" for port in options.router_ports]
    specs = [
        ProcessSpec(
            _numbered("router", number),
            "router",
            ("--host", options.host, "--port", str(port)),
            common | _free_health_port("router"),
        )
        for number, port in enumerate(options.router_ports)
    ]
    gateway = _gateway(options, artifacts, routers)
    specs += [
        ProcessSpec(
            _numbered("gateway", number),
            "gateway",
            gateway,
            common | (_free_health_port("gateway") if number else {}),
        )
        for number in range(options.gateways)
    ]
    workers = options.workers
    assigned = assign_gpus(visible_gpus(options.device), [worker.ranks for worker in workers])
    for worker, gpus in zip(workers, assigned, strict=True):
        arguments = _worker(options, artifacts, routers, worker)
        if options.colocated and worker.role == "decode":
            arguments += ("--colocated",)
        environment = common | _free_health_port(worker.role) | _gpus(worker.role, gpus)
        specs.append(ProcessSpec(worker.name, worker.role, arguments, environment))
    return [replace(spec, grace_s=_drain_s(spec.service) + _END_S) for spec in specs]


def _drain_s(service: str) -> float:
    """Return the time for which a service lets requests finish, which the environment may set."""
    default: float = ServiceSettings.model_fields["drain_s"].default
    variables = {name.upper(): value for name, value in os.environ.items()}  # as the settings do
    try:
        return float(variables.get(f"HEADRACE_{service.upper()}_DRAIN_S", default))
    except ValueError:
        return default  # the service refuses it


def _free_health_port(service: str) -> dict[str, str]:
    """Return the environment that replaces a fixed ``health_port`` by a free one.

    Container images set a fixed port. Only the first gateway uses it, since its readiness is that
    of the deployment.
    """
    name = f"HEADRACE_{service.upper()}_HEALTH_PORT"
    return {name: "0"} if os.environ.get(name) else {}


def _gpus(role: str, gpus: WorkerGpus) -> dict[str, str]:
    """Return the environment that limits a worker to its GPUs and their memory."""
    if not gpus.names:
        return {}
    if role == "encoder":  # it allocates what it needs
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus.names)}
    share = f"HEADRACE_{role.upper()}_GPU_MEMORY_UTILIZATION"
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus.names),
        share: os.environ.get(share, f"{gpus.share:.3f}"),
    }


def _numbered(service: str, number: int) -> str:
    """Return the name of a process; the first one of a service has no number."""
    return f"{service}-{number}" if number else service


def _tls(tls_dir: Path | None) -> dict[str, str]:
    if tls_dir is None:
        return {}
    files = TlsFiles.of(tls_dir)
    return {
        "HEADRACE_SECOND_CLUSTER_TOKEN": "",  # there is no first one
        "HEADRACE_TLS_CERT_FILE": str(files.certificate),
        "HEADRACE_TLS_KEY_FILE": str(files.key),
        "HEADRACE_TLS_CA_FILE": str(files.ca),
    }


def _gateway(options: UpOptions, artifacts: Artifacts, routers: list[str]) -> tuple[str, ...]:
    return (
        *(("--reuse-port",) if options.gateways > 1 else ()),
        *("--host", options.host),
        *("--port", str(options.port)),
        *("--grpc-port", str(options.grpc_port)),
        *(part for url in routers for part in ("--routers", url)),
        *("--model", str(artifacts.tokenizer) if options.generates else options.model),
        *(("--served-model-name", artifacts.served_name) if options.generates else ()),
        *(("--encoder-model", str(artifacts.encoder)) if artifacts.encoder else ()),
        *(("--served-encoder-name", artifacts.encoder_name) if artifacts.encoder else ()),
    )


def _worker(
    options: UpOptions, artifacts: Artifacts, routers: list[str], worker: WorkerOptions
) -> tuple[str, ...]:
    process: tuple[str, ...] = (
        *("--host", options.host),
        *("--worker-id", worker.name),
        *(part for url in routers for part in ("--routers", url)),
        *("--device", options.device),
    )
    if worker.role == "encoder":
        names = ("--model", str(artifacts.encoder), "--served-model-name", artifacts.encoder_name)
        return process + names
    arguments: tuple[str, ...] = (
        *process,
        *("--tp", str(worker.ranks)),
        *("--model", str(artifacts.checkpoint)),
        *("--served-model-name", artifacts.served_name),
        *("--codec", options.wire_codec),
        *("--kv-format", options.kv_format),
        *("--kv-eviction", str(options.kv_eviction)),
    )
    if artifacts.codebooks is not None:
        arguments += ("--codebooks", str(artifacts.codebooks))
    return arguments
