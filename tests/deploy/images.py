"""Readers of deploy/Dockerfile, .dockerignore and the locked requirements."""

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FLAVORS = ("control", "cpu", "cuda")


def instructions() -> list[tuple[str, str]]:
    """Return the keyword and the arguments of each instruction of the Dockerfile."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", text)
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


def arguments(keyword: str) -> list[str]:
    return [rest for found, rest in instructions() if found == keyword]


def environment() -> dict[str, str]:
    """Return all variables that ENV instructions set."""
    pairs = (part.split("=", 1) for rest in arguments("ENV") for part in shlex.split(rest))
    return dict(pairs)


def copied_sources(*flavors: str) -> list[str]:
    """Return the sources of COPY instructions that are in the build context, for these flavors."""
    sources = []
    for rest in arguments("COPY"):
        parts = rest.split()
        if not parts[0].startswith("--from"):
            for flavor in flavors:
                sources += [part.replace("${FLAVOR}", flavor) for part in parts[:-1]]
    return sorted(set(sources))


def is_ignored(path: str) -> bool:
    """Return whether .dockerignore excludes a path of the repository; the last match decides."""
    ignored = False
    parts = path.split("/")
    parents = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        anywhere = pattern.startswith("**/")
        tried = parts if anywhere else parents
        if any(fnmatch(one, pattern.removeprefix("**/")) for one in tried):
            ignored = not line.startswith("!")
    return ignored


def locked(flavor: str) -> dict[str, str]:
    """Return the version of each package in an image, by its canonical name."""
    pins = [pin for pin, _ in requirements(f"{flavor}.txt")]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}


def requirements(name: str) -> list[tuple[Requirement, list[str]]]:
    """Return the requirements in a file of `deploy/requirements`, each with its hashes."""
    text = (DEPLOY / "requirements" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    parts = [re.split(r"\s+--hash=", line.strip()) for line in lines]
    return [(Requirement(pin), hashes) for pin, *hashes in parts]
