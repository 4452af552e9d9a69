"""Values of pods: caches, images, variables, sidecars, schedulers and devices."""

import json

import pytest

from tests.operate.chart.manifests import (
    KUBERNETES,
    ROLES,
    Manifest,
    containers,
    main_container,
    pod_of,
    pod_templates,
    restricted_violations,
    scenario,
    schema_errors,
)

pytestmark = pytest.mark.operate

CLAIM = {"persistentVolumeClaim": {"claimName": "scratch"}}
DISK = {"ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}}


def volume(pod: Manifest, name: str) -> Manifest:
    """Return a volume of a pod without its name."""
    (found,) = (one for one in pod["spec"]["volumes"] if one["name"] == name)
    return {key: value for key, value in found.items() if key != "name"}


@pytest.mark.parametrize("section", ["defaults", "workers", "decode"])
def test_cache_replaces_the_default_volume(section: str) -> None:
    """A volume with two sources is refused by API servers."""
    manifests = scenario("minimal-cpu", "--set-json", f"{section}.cache={json.dumps(CLAIM)}")
    assert volume(pod_of(manifests, "decode"), "cache") == CLAIM
    others = CLAIM if section == "defaults" else {"emptyDir": {}}
    assert volume(pod_of(manifests, "router"), "cache") == others
    assert schema_errors(manifests, KUBERNETES[-1]) == []


def test_cache_of_a_role_replaces_that_of_all_roles() -> None:
    values = json.dumps(CLAIM), json.dumps(DISK)
    manifests = scenario(
        "two-node-rdma",
        *("--set-json", f"defaults.cache={values[0]},model.job.cache={values[1]}"),
        *("--set-json", f"workers.cache={values[1]}"),
    )
    caches = {
        role: volume(pod, "cache") for role, pod in pod_templates(manifests) if role != "test"
    }
    control, workers = ("gateway", "router"), ("prefill", "decode", "model")
    assert caches == dict.fromkeys(control, CLAIM) | dict.fromkeys(workers, DISK)


def test_profile_of_a_role_replaces_that_of_all_roles() -> None:
    """A seccomp profile with a file needs the type Localhost, and others must have none."""
    local = {"type": "Localhost", "localhostProfile": "headrace.json"}
    manifests = scenario(
        "minimal-cpu",
        *("--set-json", f"defaults.podSecurityContext.seccompProfile={json.dumps(local)}"),
        *("--set", "router.podSecurityContext.seccompProfile.type=RuntimeDefault"),
    )
    contexts = {role: pod["spec"]["securityContext"] for role, pod in pod_templates(manifests)}
    assert contexts["decode"]["seccompProfile"] == local
    assert contexts["router"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_images_are_pinned_by_the_digest_of_their_flavor() -> None:
    digests = {flavor: f"sha256:{number:064x}" for number, flavor in enumerate(("control", "cuda"))}
    manifests = scenario(
        "one-gpu-node",
        *("--set-json", f"image.digests={json.dumps(digests)}"),
        *("--set", "router.image.tag=patched"),
    )
    found = {role: main_container(pod)["image"] for role, pod in pod_templates(manifests)}
    assert found == {
        "gateway": f"headrace@{digests['control']}",
        "test": f"headrace@{digests['control']}",
        "router": "headrace:patched",
        "prefill": f"headrace@{digests['cuda']}",
        "decode": f"headrace@{digests['cuda']}",
    }


def test_own_variable_replaces_that_of_the_chart() -> None:
    """API servers refuse duplicates in server-side apply, which Helm 4 uses."""
    variable = {"name": "OMP_NUM_THREADS", "value": "3"}
    manifests = scenario("minimal-cpu", "--set-json", f"workers.env={json.dumps([variable])}")
    for role in ("prefill", "decode"):
        env = main_container(pod_of(manifests, role))["env"]
        assert [entry for entry in env if entry["name"] == "OMP_NUM_THREADS"] == [variable]


def test_sidecars_and_init_containers_are_added() -> None:
    box = {"name": "wait", "image": "busybox:1.37", "command": ["true"]}
    manifests = scenario(
        "model-change", "--set-json", f"defaults.extraInitContainers={json.dumps([box])}"
    )
    for role in ROLES:
        pod = pod_of(manifests, role)
        assert pod["spec"]["initContainers"] == [box]
        assert main_container(pod)["name"] == role
    names = [one["name"] for one in containers(pod_of(manifests, "gateway"))]
    assert names == ["wait", "gateway", "login"]


def test_init_containers_precede_the_download() -> None:
    """Such as one that opens a tunnel to the hub."""
    box = {"name": "tunnel", "image": "tunnel:1", "restartPolicy": "Always"}
    manifests = scenario(
        "minimal-cpu",
        *("--set", "model.fetch.repository=a/b"),
        *("--set-json", f"defaults.extraInitContainers={json.dumps([box])}"),
    )
    names = [one["name"] for one in pod_of(manifests, "decode")["spec"]["initContainers"]]
    assert names == ["tunnel", "model"]


def test_workers_claim_devices_and_name_their_scheduler() -> None:
    manifests = scenario("model-change")
    for role in ("prefill", "decode", "prefill-green", "decode-green"):
        pod = pod_of(manifests, role)
        assert pod["spec"]["schedulerName"] == "kai-scheduler"
        claims = [{"name": "gpu", "resourceClaimTemplateName": "headrace-gpu"}]
        assert pod["spec"]["resourceClaims"] == claims
        assert main_container(pod)["resources"]["claims"] == [{"name": "gpu"}]
    assert "schedulerName" not in pod_of(manifests, "router")["spec"]


def test_sidecar_of_the_scenario_meets_the_restricted_standard() -> None:
    pods = pod_templates(scenario("model-change"))
    assert [found for _, pod in pods for found in restricted_violations(pod)] == []


def test_job_that_only_downloads_takes_no_device() -> None:
    """Workers that wait for it may hold all GPUs of the cluster."""
    claims = json.dumps([{"name": "gpu", "resourceClaimName": "g"}])
    values = ("--set", "model.prepare.keep=0,model.prepare.codebooks=false")
    for given in (
        ("--set", r"model.job.resources.limits.nvidia\.com/gpu=1"),
        (
            "--set-json",
            f'model.job.resourceClaims={claims},model.job.resources.claims=[{{"name": "gpu"}}]',
        ),
    ):
        job = pod_of(scenario("two-node-rdma", *values, *given), "model")
        assert "resourceClaims" not in job["spec"]
        assert main_container(job)["resources"] == {
            "requests": {"cpu": "8", "memory": "64Gi"},
            "limits": {"cpu": "16", "memory": "96Gi"},
        }
    kept = pod_of(scenario("two-node-rdma"), "model")
    assert main_container(kept)["resources"]["limits"]["nvidia.com/gpu"] == 1
