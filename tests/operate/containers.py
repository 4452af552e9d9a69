"""Images of deploy/Dockerfile, built and run by buildah as root, without a daemon or a registry.

buildah starts itself again in a chroot, without `LD_LIBRARY_PATH`: its package must be installed.
The base image is a minimal Debian 12 with its Python, made by mmdebstrap. Steps of the build run in
a chroot, and install packages from a folder of wheels that the host's pip downloads.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.deploy.images import DEPLOY, ROOT, arguments, copied_sources
from tests.operate.debian import CACHE

FOLDER = CACHE / "images"
_RELEASE, _PYTHON = "bookworm", "3.11"
_BASE = "localhost/headrace-base"
_BASE_PACKAGES = ("python3", "python3-venv", "python-is-python3", "ca-certificates")
# As in Debian's own slim images.
_EXCLUDED = ("doc", "info", "locale", "man")
_STEP_S = 1500.0  # maximum time of one command on a busy machine


def missing() -> str | None:
    """Return why images cannot be built on this host, or None if they can."""
    if os.geteuid() != 0:
        return "building images without a daemon needs root"
    absent = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    return f"install the Debian packages {' and '.join(absent)}" if absent else None


class Buildah:
    """Images and containers in `FOLDER`."""

    def build(self, flavor: str) -> str:
        """Build an image and return its name. Unchanged steps are those of the last build."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._make_base()
        wheels = _wheels(flavor)
        config = FOLDER / "pip.conf"
        config.write_text("[global]\nno-index = true\nfind-links = /packages\n")
        name = f"localhost/headrace:{flavor}"
        self.run(
            # OCI's format has no health check.
            *("build", "--isolation", "chroot", "--layers", "--format", "docker", "--pull-never"),
            *("--build-arg", f"PYTHON={_BASE}", "--build-arg", f"FLAVOR={flavor}"),
            *("--volume", f"{wheels}:/packages:ro", "--volume", f"{config}:/etc/pip.conf:ro"),
            *("--file", str(DEPLOY / "Dockerfile"), "--tag", name, str(ROOT)),
        )
        return name

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        """Create a container of an image, and yield its name."""
        name = self.run("from", "--pull-never", image).strip()
        try:
            yield name
        finally:
            self.run("rm", name)

    def config(self, image: str) -> dict[str, Any]:
        """Return the configuration of an image: ``Entrypoint``, ``User``, ``Healthcheck`` …"""
        config: dict[str, Any] = json.loads(self.run("inspect", "--type", "image", image))
        return dict(config["Docker"]["config"])

    def size(self, image: str) -> int:
        """Return the bytes of all files in an image."""
        with self.container(image) as container:
            root = self.run("mount", container).strip()
            listed = _output(["du", "--summarize", "--bytes", "--one-file-system", root])
        return int(listed.split()[0])

    def process(
        self, container: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a program in a container, as the user of its image, on the network of the host.

        Termination of the process ends the program.
        """
        pairs = (part for pair in environment.items() for part in ("--env", "=".join(pair)))
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self._command("run"), "--isolation", "chroot", *pairs, container, "--", *command],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, name: str, *arguments: str) -> str:
        """Run a command of buildah, and return its output."""
        return _output([*self._command(name), *arguments])

    def _command(self, name: str) -> list[str]:
        storage = ("--root", str(FOLDER / "storage"), "--runroot", str(FOLDER / "run"))
        return ["buildah", *storage, name]

    def _make_base(self) -> None:
        if _BASE in self.run("images", "--format", "{{.Name}}").split():
            return
        archive = FOLDER / "base.tar"
        excluded = (f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _EXCLUDED)
        include = f"--include={','.join(_BASE_PACKAGES)}"
        mmdebstrap = ("mmdebstrap", "--mode=root", "--variant=minbase")
        _output([*mmdebstrap, include, *excluded, _RELEASE, str(archive)])
        with self.container("scratch") as container:
            self.run("add", container, str(archive), "/")
            self.run("commit", container, _BASE)
        archive.unlink()


def _wheels(flavor: str) -> Path:
    """Return a folder with all wheels that the build of an image installs."""
    files = [ROOT / path for path in copied_sources(flavor) if path.endswith(".txt")]
    (index,) = (rest for rest in arguments("ARG") if rest.startswith("TORCH_INDEX="))
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    folder = FOLDER / f"wheels-{flavor}-{key[:12]}"
    if folder.is_dir():
        return folder
    partial = folder.with_suffix(".partial")
    options = ("--quiet", "--only-binary", ":all:", "--python-version", _PYTHON, "--dest", partial)
    download = [sys.executable, "-m", "pip", "download", *map(str, options)]
    for file in files:
        locked = [*download, "--no-deps", "--requirement", str(file)]
        try:
            _output(locked)
        except RuntimeError:  # the CPU build of torch is not on PyPI
            _output([*locked, "--extra-index-url", index.partition("=")[2]])
    return partial.rename(folder)


def _output(command: Sequence[str]) -> str:
    """Return the standard output of a command, or raise an error with all its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_STEP_S)
    if done.returncode:
        shown = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"{command[0]} failed with status {done.returncode}:\n{shown}")
    return done.stdout
