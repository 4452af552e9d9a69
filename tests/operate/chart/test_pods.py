"""Values of pods: caches, images, variables, sidecars, schedulers and devices."""

import json

import pytest

from tests.operate.chart.manifests import (
    KUBERNETES,
    ROLES,
    Manifest,
    containers,
    helm,
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


def gpus_of(pod: Manifest) -> dict[str, int]:
    """Return the GPUs that the main container of a pod requests."""
    limits = main_container(pod)["resources"].get("limits", {})
    return {name: amount for name, amount in limits.items() if "nvidia.com" in name}


def test_number_of_ranks_sets_gpus_threads_and_shared_memory() -> None:
    manifests = scenario("several-gpus")
    for role, ranks in (("prefill", 2), ("decode", 4)):
        pod = pod_of(manifests, role)
        variables = {one["name"]: one.get("value") for one in main_container(pod)["env"]}
        assert variables[f"HEADRACE_{role.upper()}_TP"] == str(ranks)
        assert variables["OMP_NUM_THREADS"] == str(32 // ranks), "of the CPU limit"
        assert gpus_of(pod) == {"nvidia.com/gpu": ranks}
        memory = {"medium": "Memory", "sizeLimit": f"{ranks}Gi"}
        assert volume(pod, "shm") == {"emptyDir": memory}
    assert gpus_of(pod_of(manifests, "gateway")) == {}


@pytest.mark.parametrize(
    ("limit", "threads"), [("7", "3"), ("2500m", "1"), ("500m", "1"), ("1.5", "1")]
)
def test_each_rank_has_at_least_one_thread(limit: str, threads: str) -> None:
    manifests = scenario(
        *("minimal-cpu", "--set", "workers.settings.tp=2"),
        *("--set-string", f"workers.resources.limits.cpu={limit}"),
    )
    for role in ("prefill", "decode"):
        pod = pod_of(manifests, role)
        variables = {one["name"]: one.get("value") for one in main_container(pod)["env"]}
        assert variables["OMP_NUM_THREADS"] == threads
        assert gpus_of(pod) == {}, "the image is for the CPU"


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_choose_their_threads_if_there_is_no_cpu_limit(ranks: int) -> None:
    manifests = helm("4.1").render("--set", f"workers.settings.tp={ranks}")
    for role in ("prefill", "decode"):
        variables = {one["name"]: one for one in main_container(pod_of(manifests, role))["env"]}
        assert ("OMP_NUM_THREADS" in variables) is (ranks == 1)


@pytest.mark.parametrize(
    ("size", "total"), [("512Mi", "1024Mi"), ("1.5Gi", "3Gi"), ("1.25G", "2.500G")]
)
def test_shared_memory_is_a_size_for_each_rank(size: str, total: str) -> None:
    values = ("--set", "workers.settings.tp=2", "--set-string", f"workers.sharedMemory={size}")
    pod = pod_of(scenario("minimal-cpu", *values), "decode")
    assert volume(pod, "shm")["emptyDir"]["sizeLimit"] == total


def test_gpus_of_the_values_are_kept() -> None:
    """One rank may use any resource; several may use claims, or as many GPUs as there are ranks."""
    shared = scenario("minimal-cpu", "--set", *one_gpu("workers", "nvidia\\.com/gpu\\.shared", 1))
    assert gpus_of(pod_of(shared, "decode")) == {"nvidia.com/gpu.shared": 1}
    same = scenario("several-gpus", "--set", *one_gpu("decode", "nvidia\\.com/gpu", 4))
    assert gpus_of(pod_of(same, "decode")) == {"nvidia.com/gpu": 4}
    claims = scenario("model-change", "--set", "workers.settings.tp=2")
    assert gpus_of(pod_of(claims, "decode")) == {}


def one_gpu(section: str, resource: str, count: int) -> tuple[str, ...]:
    return (f"workers.image.flavor=cuda,{section}.resources.limits.{resource}={count}",)


def test_job_of_workers_with_several_ranks_uses_one_gpu() -> None:
    """The Job that prepares the model computes on one GPU; one that only downloads, on none."""
    values = (
        *("--set", "workers.image.flavor=cuda,workers.settings.tp=2"),
        *("--set", "model.claim.enabled=true,model.fetch.repository=a/b"),
    )
    for prepare, expected in (("true", {"nvidia.com/gpu": 1}), ("false", {})):
        manifests = scenario("minimal-cpu", *values, "--set", f"model.prepare.codebooks={prepare}")
        assert gpus_of(pod_of(manifests, "model")) == expected
        assert gpus_of(pod_of(manifests, "prefill")) == {"nvidia.com/gpu": 2}


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
