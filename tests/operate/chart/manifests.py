"""Rendered manifests: scenarios, pods and what an API server would check in them."""

import json
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.operate.chart.tools import CHART, Helm, custom_models, kubernetes_schemas

Manifest = dict[str, Any]

HELMS = ("3.17", "4.1")
KUBERNETES = ("1.34", "1.37")
SCENARIOS = tuple(sorted(path.stem.removesuffix("-values") for path in CHART.glob("ci/*.yaml")))
ROLES = ("gateway", "router", "prefill", "decode")

_CUSTOM_GROUPS = (
    "cert-manager.io",
    "gateway.networking.k8s.io",
    "keda.sh",
    "monitoring.coreos.com",
)
_NAME = {"type": "string", "minLength": 1}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def _object(*required: str, **properties: Any) -> Manifest:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


_INFERENCE_POOL = _object(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "inference.networking.k8s.io/v1"},
    kind={"const": "InferencePool"},
    metadata={"type": "object"},
    spec=_object(
        *("selector", "targetPorts", "endpointPickerRef"),
        selector=_object("matchLabels", matchLabels={"type": "object"}),
        targetPorts={
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": _object("number", number=_PORT),
        },
        endpointPickerRef=_object(
            *("name",),
            group={"type": "string"},
            kind=_NAME,
            name=_NAME,
            port=_object("number", number=_PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
)
"""Fields of an InferencePool v1 of the Gateway API inference extension."""


@cache
def helm(version: str) -> Helm:
    return Helm.of(version)


@cache
def scenario(name: str, *arguments: str, version: str = "4.1") -> list[Manifest]:
    """Return the manifests of a scenario of ``ci/``."""
    return helm(version).render("--values", f"ci/{name}-values.yaml", *arguments)


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    return next(m for m in of_kind(manifests, kind) if m["metadata"]["name"] == name)


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the component and the pod, with `metadata` and `spec`, of each workload."""
    for manifest in manifests:
        pod = manifest if manifest["kind"] == "Pod" else manifest.get("spec", {}).get("template")
        if pod:
            yield pod["metadata"]["labels"]["app.kubernetes.io/component"], pod


def pod_of(manifests: list[Manifest], role: str) -> Manifest:
    return dict(pod_templates(manifests))[role]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def main_container(pod: Manifest) -> Manifest:
    """Return the container of the role; sidecars follow it."""
    first: Manifest = pod["spec"]["containers"][0]
    return first


def schema_errors(manifests: list[Manifest], version: str) -> list[str]:
    """Return what strict validation against the schemas of a Kubernetes version finds."""
    errors, custom = [], []
    for manifest in manifests:
        group = manifest["apiVersion"].rpartition("/")[0]
        if group in _CUSTOM_GROUPS:
            custom.append(manifest)
            continue
        pool = manifest["kind"] == "InferencePool"
        validator = (
            jsonschema.Draft202012Validator(_INFERENCE_POOL)
            if pool
            else _core(version, manifest["kind"], manifest["apiVersion"])
        )
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        errors += [f"{name}: {e.json_path}: {e.message}" for e in validator.iter_errors(manifest)]
    return errors + _custom_errors(custom)


@cache
def _core(version: str, kind: str, api_version: str) -> jsonschema.protocols.Validator:
    schemas = kubernetes_schemas(version)
    group, _, short = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], short)))
    definitions = Resource.from_contents(schemas["_definitions.json"], DRAFT202012)
    registry: Registry[Any] = Registry().with_resource("/api/_definitions.json", definitions)
    return jsonschema.Draft202012Validator(schemas[f"{name}.json"], registry=registry)


def _custom_errors(manifests: list[Manifest]) -> list[str]:
    script = Path(__file__).with_name("custom_check.mjs")
    done = subprocess.run(
        ["node", str(script), str(custom_models())],
        input=json.dumps(manifests),
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def restricted_violations(pod: Manifest) -> list[str]:
    """Return what the Pod Security Standard "restricted" forbids in a pod."""
    spec = pod["spec"]
    found = []
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image"}
    allowed |= {"persistentVolumeClaim", "projected", "secret"}
    for volume in spec.get("volumes", []):
        found += [f"volume {volume['name']}: {s}" for s in volume.keys() - allowed - {"name"}]
    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    for container in containers(pod):
        security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        capabilities = security.get("capabilities", {})
        rules = {
            "runAsNonRoot": security.get("runAsNonRoot") is True,
            "runAsUser": security.get("runAsUser") != 0,
            "seccomp": security.get("seccompProfile", {}).get("type")
            in ("RuntimeDefault", "Localhost"),
            "privilege escalation": security.get("allowPrivilegeEscalation") is False,
            "privileged": not security.get("privileged"),
            "drop ALL": "ALL" in capabilities.get("drop", []),
            "add": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "host ports": not any(port.get("hostPort") for port in container.get("ports", [])),
        }
        found += [f"{container['name']}: {rule}" for rule, kept in rules.items() if not kept]
    return found
