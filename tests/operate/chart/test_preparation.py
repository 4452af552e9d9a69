"""The rendered commands that download and prepare a model, against a hub on loopback."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.checkpoint import FactorPair, load_checkpoint
from runtime.checkpoint.assemble import named_tensors
from tests.operate.chart.hub import model_hub
from tests.operate.chart.manifests import (
    Manifest,
    containers,
    main_container,
    of_kind,
    pod_of,
    pod_templates,
    scenario,
)
from tests.runtime.offline.convert.samples import save_folder
from tests.runtime.tiny import CONFIG, tiny_checkpoint
from tests.services.tiny_model import save_tokenizer

pytestmark = [pytest.mark.operate, pytest.mark.timeout(1800)]

REPOSITORY = "meta-llama/Meta-Llama-3-8B-Instruct"
COMMIT = "8afb486c1db24fe5011ec46dfbe5b5dccdb575c2"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "repository"
    checkpoint = tiny_checkpoint(config=replace(CONFIG, context_length=4096))
    save_folder(checkpoint, named_tensors(checkpoint), folder)
    save_tokenizer(folder)
    (folder / "original.bin").write_bytes(b"not wanted")
    return folder


def run(container: Manifest, models: Path, url: str) -> None:
    """Run a container's shell command with local folders for /models and /cache."""
    programs = models.parent / "bin"
    programs.mkdir(exist_ok=True)
    headrace = programs / "headrace"
    headrace.write_text(f'#!/bin/sh\nexec {sys.executable} -m services.cli "$@"\n')
    headrace.chmod(0o755)
    environment = {
        "PATH": f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd())),
        "HF_ENDPOINT": url,
        "OMP_NUM_THREADS": "1",
    }
    for entry in container.get("env", []):
        value = entry.get("value", "hub-token")
        environment.setdefault(entry["name"], value.replace("/cache", str(models.parent / "cache")))
    script = container["args"][0].replace("/models/", f"{models}/")
    subprocess.run(
        [*container["command"], script],
        check=True,
        env=environment,
        cwd=models,
        timeout=600,
    )


def test_job_downloads_factorizes_and_calibrates_once(repository: Path, tmp_path: Path) -> None:
    manifests = scenario("two-node-rdma")
    job = pod_of(manifests, "model")
    models = tmp_path / "models"
    models.mkdir()
    with model_hub(repository, REPOSITORY, COMMIT) as (url, downloaded):
        run(containers(job)[0], models, url)
        assert sorted(downloaded) == ["config.json", "model.safetensors", "tokenizer.json"]
        (folder,) = models.iterdir()
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
        run(containers(job)[0], models, url)  # a pod of the Job that starts again
        assert len(downloaded) == 3
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert {p for p in before if before[p] != after[p]} == {folder / "complete"}

    worker = main_container(pod_of(manifests, "decode"))
    environment = {entry["name"]: entry.get("value", "") for entry in worker["env"]}
    model = Path(environment["HEADRACE_DECODE_MODEL"].replace("/models", str(models)))
    layers = load_checkpoint(model).layers
    linears = [
        getattr(layer, name) for layer in layers for name in ("q", "o", "gate", "up", "down")
    ]
    assert any(isinstance(linear, FactorPair) for linear in linears)
    codebooks = Path(environment["HEADRACE_DECODE_CODEBOOKS"].replace("/models", str(models)))
    assert codebooks.stat().st_size > 100
    waiting = containers(pod_of(manifests, "decode"))[0]
    run(waiting, models, "")  # ends, since the model is complete


def test_init_containers_download_what_their_role_needs(repository: Path, tmp_path: Path) -> None:
    manifests = scenario(
        "minimal-cpu", "--set", f"model.fetch.repository={REPOSITORY},model.fetch.revision={COMMIT}"
    )
    assert of_kind(manifests, "Job") == []
    pods = dict(pod_templates(manifests))
    assert "initContainers" not in pods["router"]["spec"]
    for role, expected in (
        ("gateway", ["config.json", "tokenizer.json"]),
        ("decode", ["config.json", "model.safetensors", "tokenizer.json"]),
    ):
        models = tmp_path / role / "models"
        models.mkdir(parents=True)
        init, container = containers(pods[role])
        with model_hub(repository, REPOSITORY, COMMIT) as (url, downloaded):
            run(init, models, url)
        assert sorted(downloaded) == expected
        environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        model = environment[f"HEADRACE_{role.upper()}_MODEL"].replace("/models", str(models))
        assert (Path(model) / "tokenizer.json").is_file()
