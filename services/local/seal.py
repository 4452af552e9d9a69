"""Checksum files of cached artifacts, to detect damage before a service loads them.

An artifact is a file or a folder. Its seal, ``<artifact>.seal``, lists the size and the SHA-256 of
each file. Files above `MAX_HASHED_BYTES` are checked by size only: hashing the weights of a large
model would take longer than loading them.
"""

import hashlib
import json
import os
from pathlib import Path

from services.common.file_errors import naming

MAX_HASHED_BYTES = 64 << 20


def seal(artifact: Path) -> None:
    """Write the seal of an artifact, atomically."""
    path = _seal_file(artifact)
    draft = path.with_name(f"{path.name}.draft-{os.getpid()}")
    with naming(path):
        draft.write_text(json.dumps(_contents(artifact), indent=1))
    draft.replace(path)


def is_sealed(artifact: Path) -> bool:
    """Return whether the artifact has a seal, even an invalid one."""
    return _seal_file(artifact).exists()


def is_intact(artifact: Path) -> bool:
    """Return whether every file that the seal lists exists unchanged. Other files are ignored."""
    try:
        sealed = dict(json.loads(_seal_file(artifact).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return False
    contents = _contents(artifact)
    return all(contents.get(name) == entry for name, entry in sealed.items())


def _contents(artifact: Path) -> dict[str, list[int | str | None]]:
    files = [artifact] if artifact.is_file() else sorted(artifact.rglob("*"))
    return {str(file.relative_to(artifact)): _entry(file) for file in files if file.is_file()}


def _entry(file: Path) -> list[int | str | None]:
    """Return the size in bytes and the SHA-256, which is None for a large file."""
    size = file.stat().st_size
    if size > MAX_HASHED_BYTES:
        return [size, None]
    return [size, hashlib.sha256(file.read_bytes()).hexdigest()]


def _seal_file(artifact: Path) -> Path:
    return artifact.with_name(f"{artifact.name}.seal")
