"""Environments of clients: each has its own packages, at the versions in `requirements`.

They are made on first use, in the folder of the variable HEADRACE_CLIENTS or in `.clients` of the
repository, and again when a requirements file changes. These files are the output of `pip freeze`
after an installation of the client without pinned versions of its dependencies.

uv installs the packages, several times faster than pip. It takes them from the sources that pip is
configured to use.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deploy.uv import sources_of_pip

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
NODE_PACKAGES = Path(__file__).parent / "node"
_INSTALL_S = 1800.0
_KEY_DIGITS = 12
_TORCH_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")


class InstallationFailed(Exception):
    """The packages of a client could not be installed."""


def python_of(client: str) -> Path:
    """Return the Python interpreter of a client's environment, which is made if needed.

    Args:
        client: name of a file in `requirements`, without suffix.

    Raises:
        InstallationFailed: with the output of uv.
    """
    requirements = REQUIREMENTS / f"{client}.txt"
    with _environment(client, requirements.read_bytes()) as (folder, is_new):
        python = folder / "bin" / "python"
        if is_new:
            variables = sources_of_pip()
            _uv(["venv", "--python", sys.executable, str(folder)], variables)
            install = ["pip", "install", "--python", str(python), "--no-deps", "-r"]
            try:
                _uv([*install, str(requirements)], variables)
            except InstallationFailed:
                if "+cpu" not in requirements.read_text():
                    raise
                # The configured sources may lack the CPU build of torch.
                _uv([*install, str(requirements), "--index", _TORCH_INDEX], variables)
    return python


def node_modules() -> Path:
    """Return a folder with the Node.js packages of `node`, which are installed if needed.

    Raises:
        InstallationFailed: with the output of npm.
    """
    lock = NODE_PACKAGES / "package-lock.json"
    with _environment("node", lock.read_bytes()) as (folder, is_new):
        if is_new:
            folder.mkdir()
            for name in ("package.json", lock.name):
                shutil.copy(NODE_PACKAGES / name, folder)
            _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
    return folder


@contextmanager
def _environment(client: str, content: bytes) -> Iterator[tuple[Path, bool]]:
    """Yield a client's folder, and whether it must be filled; remove it if that fails.

    Another process that wants the same environment waits.
    """
    cache = Path(os.environ.get("HEADRACE_CLIENTS", ROOT / ".clients"))
    cache.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(content + sys.version.encode()).hexdigest()[:_KEY_DIGITS]
    folder, done = cache / f"{client}-{key}", cache / f"{client}-{key}.done"
    with (cache / f"{client}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = not done.exists()
        if is_new:
            for old in cache.glob(f"{client}-{'[0-9a-f]' * _KEY_DIGITS}*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        yield folder, is_new
        done.touch()


def _uv(arguments: list[str], variables: dict[str, str]) -> None:
    own = Path(sys.executable).with_name("uv")
    _run([str(own) if own.exists() else "uv", "--quiet", *arguments], ROOT, variables)


def _run(command: list[str], folder: Path, variables: Mapping[str, str] | None = None) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command,
        cwd=folder,
        env={**(variables or {}), **inherited},
        capture_output=True,
        text=True,
        timeout=_INSTALL_S,
    )
    if result.returncode:
        raise InstallationFailed(f"{' '.join(command)}: {result.stdout}{result.stderr}")
