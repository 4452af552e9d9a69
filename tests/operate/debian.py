"""Programs of Debian packages, unpacked without root and without installing anything.

apt resolves the packages that the host lacks, with lists and a cache in a folder of its own; only
the host's package status is read, never written. `dpkg-deb` unpacks them, so no maintainer script
runs. The result is reused until the host's packages change.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
CACHE = _REPOSITORY / ".operate"
"""Folder of what was downloaded and unpacked. Git ignores it, and it may be deleted any time."""

_STATUS = Path("/var/lib/dpkg/status")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TIMEOUT_S = 240.0
"""Time limit of one command of apt or dpkg, in seconds."""


class DebianError(Exception):
    """The packages cannot be provided: not a Debian host, an unknown name or no archive."""


@dataclass(frozen=True)
class Unpacked:
    """Debian packages in a folder, with the libraries that the host lacks.

    Attributes:
        root: the folder, laid out as ``/``: ``root / "usr/bin"`` and so on.
    """

    root: Path

    def program(self, name: str) -> Path:
        """Return the path of a program, from the folder or, if the host has it, from the host.

        Args:
            name: a command such as ``promtool``, or a path from the root such as
                ``usr/lib/chromium/chromium``.

        Raises:
            DebianError: if neither has it.
        """
        places = (name,) if "/" in name else (f"usr/bin/{name}", f"usr/sbin/{name}", f"bin/{name}")
        for path in (base / place for base in (self.root, Path("/")) for place in places):
            if path.is_file() and os.access(path, os.X_OK):
                return path
        raise DebianError(f"the packages in {self.root} have no program {name}")

    @property
    def environment(self) -> dict[str, str]:
        """Environment for the programs: this process's, with the libraries of the folder."""
        triplet = f"{platform.machine()}-linux-gnu"
        libraries = (
            file
            for base in (self.root / "usr/lib" / triplet, self.root / "lib" / triplet)
            for file in base.rglob("*.so*")
        )
        folders = {file.parent for file in libraries}  # programs also load from private ones
        paths = [str(folder) for folder in sorted(folders, key=lambda f: (len(f.parts), f))]
        if inherited := os.environ.get("LD_LIBRARY_PATH"):
            paths.append(inherited)
        return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(paths)}


def unpack(*packages: str, cache: Path = CACHE) -> Unpacked:
    """Download and unpack Debian packages and those of their dependencies that the host lacks.

    Args:
        packages: names of packages in the host's Debian release.
        cache: folder in which the lists, the archives and the unpacked files are kept.

    Raises:
        DebianError: if the host is no Debian, or apt cannot provide a package.
    """
    release = _release()
    cache.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(_STATUS.read_bytes() + " ".join(sorted(packages)).encode()).hexdigest()
    root = cache / f"{'+'.join(sorted(packages))}-{key[:12]}"
    with _locked(cache / "lock"):
        if not root.is_dir():
            archives = _download(release, packages, cache / "apt")
            _unpack_all(archives, root)
    return Unpacked(root)


def _release() -> str:
    """Return the code name of the host's Debian release."""
    release = platform.freedesktop_os_release()
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if release["ID"] != "debian" or missing or not _KEYRING.is_file():
        raise DebianError(
            "these tests need a Debian host with apt-get, dpkg-deb and debian-archive-keyring; "
            f"this is {release.get('PRETTY_NAME', release['ID'])}, without {missing or _KEYRING}"
        )
    return release["VERSION_CODENAME"]


def _download(release: str, packages: tuple[str, ...], folder: Path) -> list[Path]:
    """Download the packages that apt would install, and return their archives."""
    archives = folder / "cache" / "archives"
    for partial in (archives / "partial", folder / "lists" / "partial"):
        partial.mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    sources.write_text(
        "".join(
            f"deb [signed-by={_KEYRING}] http://deb.debian.org/{archive} {suite} main\n"
            for archive, suite in (
                ("debian", release),
                ("debian", f"{release}-updates"),
                ("debian-security", f"{release}-security"),
            )
        )
    )
    settings = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": folder,
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": _STATUS,
        "Dir::Cache": folder / "cache",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",  # by default root downloads as _apt, which needs folders too
        "APT::Update::Error-Mode": "any",
        "Acquire::Retries": 3,
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    _run([*apt, "update"])
    install = [*apt, "--no-remove", "--yes", "install", *packages]
    wanted = [line.split()[1] for line in _run([*install, "--print-uris"]).splitlines()]
    _run([*install, "--download-only"])
    return [archives / name for name in wanted]


def _unpack_all(archives: list[Path], root: Path) -> None:
    """Unpack archives into a new folder; it appears under its name once it is complete."""
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for archive in archives:
        _run(["dpkg-deb", "--extract", str(archive), str(partial)])
        archive.unlink()
    partial.rename(root)


def _run(command: list[str]) -> str:
    """Return the standard output of a command; its standard error is the error's text."""
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
        )
    except subprocess.TimeoutExpired as error:
        raise DebianError(f"{command[0]} took more than {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise DebianError(f"{command[0]} failed with status {done.returncode}:\n{done.stderr}")
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
