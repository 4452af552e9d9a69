"""What a deployment needs beside the model: factor pairs, codebooks. Made once, then cached."""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.common.errors import SettingsError
from services.common.model_source import model_name, resolve_model
from services.local.options import UpOptions
from services.local.state import cache_dir

RECIPE = 4  # of the artifacts; a change of how they are made, or of METHOD, makes them anew
CODEBOOKS = 3  # the version of their artifact, see codec/codebook.py


@dataclass(frozen=True)
class Artifacts:
    """Paths of what the processes read. ``codebooks`` is None where KV travels raw."""

    checkpoint: Path
    tokenizer: Path
    codebooks: Path | None
    served_name: str


def artifact_folder(source: Path, keep: float | None) -> Path:
    """Where the artifacts of a model live: named by the source's files as they are now."""
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    identity = [
        f"{file}:{stat.st_size}:{stat.st_mtime_ns}"
        for file in files
        if file.is_file()
        for stat in (file.stat(),)
    ]
    key = "\n".join([f"recipe {RECIPE} keep {keep or 1.0}", *identity])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_dir() / "artifacts" / f"{source.stem}-{digest}"


def prepare(options: UpOptions, console: Console) -> Artifacts:
    """Makes what is missing, each in a process of its own that shows its progress.

    Raises:
        SettingsError: the model is not there, or an artifact cannot be made.
    """
    source = resolve_model(options.model)
    factorized = options.keep is not None and options.keep < 1.0
    folder = artifact_folder(source, options.keep if factorized else None)
    checkpoint, codebooks = source, None
    if factorized:
        checkpoint = folder / "checkpoint"
        if not checkpoint.exists():
            console.print(f"factorizing {source.name} at keep {options.keep} (once)")
            _make(
                *("compress", "--model", str(source), "--keep", str(options.keep)),
                *("--out", str(checkpoint)),
            )
    if options.codec != "raw":
        codebooks = folder / _codebooks_name(options.kv_format)
        if not codebooks.exists():
            console.print(f"calibrating the codec for {source.name} (once)")
            _make(
                *("calibrate", "--model", str(checkpoint), "--tokenizer", str(source)),
                *("--out", str(codebooks), "--kv-format", options.kv_format),
            )
    name = model_name(source)
    served = f"{name}-keep{options.keep:g}" if factorized else name
    return Artifacts(checkpoint, source, codebooks, served)


def _codebooks_name(kv_format: str) -> str:
    """Return the file name of the codebooks for one KV format."""
    if kv_format == "dense":
        return f"codebooks-{CODEBOOKS}.json"
    return f"codebooks-{CODEBOOKS}-{hashlib.sha256(kv_format.encode()).hexdigest()[:8]}.json"


def _make(*arguments: str) -> None:
    # Nothing else runs yet, so it may have all cores, whatever the workers are limited to.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "services.cli", *arguments]
    done = subprocess.run(command, check=False, env=environment)
    if done.returncode != 0:
        raise SettingsError(f"`headrace {' '.join(arguments)}` failed")
