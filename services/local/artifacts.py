"""Cached artifacts of a deployment: the factorized checkpoint and the codebooks."""

import hashlib
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from runtime.kv.names import is_calibrated
from services.common.cache import cache_dir
from services.common.errors import SettingsError
from services.common.interpreter import headrace_command
from services.common.model_source import model_name, resolve_model
from services.common.signals import end_with_parent
from services.local.lock import LockHeld, locked
from services.local.options import UpOptions
from services.local.seal import is_intact, is_sealed, seal

RECIPE = 6
"""Version of the commands that make artifacts, including the default method of factorization."""
CODEBOOKS = 3
"""Version of the codebook file; see `codec.codebook`."""
_CHECKPOINT = "checkpoint"
_STDERR = 2
"""File descriptor of the standard error output."""
_INTERRUPT_S = 10.0
"""Time in which an interrupted command ends, seconds."""


@dataclass(frozen=True)
class Artifacts:
    """Files that the processes read.

    Attributes:
        checkpoint: model that workers load.
        tokenizer: model file or folder from which the gateway loads the tokenizer.
        codebooks: codebooks of the codec, or None if KV is sent raw.
        served_name: model name that clients use; without a model, that of the encoder.
        encoder: folder of the encoder, or None.
        encoder_name: name of the encoder that clients use; empty without one.
    """

    checkpoint: Path
    tokenizer: Path
    codebooks: Path | None
    served_name: str
    encoder: Path | None = None
    encoder_name: str = ""


def artifact_folder(source: Path, keep: float | None) -> Path:
    """Return the folder of a model's artifacts. Its name changes with the files of ``source``."""
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


def is_factorized(options: UpOptions) -> bool:
    """Return whether the factorized checkpoint for ``keep`` is complete; True for a dense model.

    Raises:
        SettingsError: if the model does not exist.
    """
    if not options.generates or options.keep is None or options.keep == 1.0:
        return True
    folder = artifact_folder(resolve_model(options.model), options.keep)
    return is_intact(folder / _CHECKPOINT)


def prepare(options: UpOptions, console: Console) -> Artifacts:
    """Make the artifacts that are missing or damaged, each in a separate process.

    Raises:
        SettingsError: if a model does not exist or an artifact cannot be made.
    """
    if options.encoder is None:
        return _prepare(options, console)
    encoder = resolve_model(options.encoder)
    name = model_name(encoder)
    if not options.generates:
        return Artifacts(encoder, encoder, None, name, encoder, name)
    return replace(_prepare(options, console), encoder=encoder, encoder_name=name)


def _prepare(options: UpOptions, console: Console) -> Artifacts:
    """Make the artifacts of the model that generates text."""
    source = resolve_model(options.model)
    factorized = options.keep is not None and options.keep < 1.0
    name = model_name(source)
    served_name = f"{name}-keep{options.keep:g}" if factorized else name
    if not factorized and options.wire_codec == "raw":
        return Artifacts(source, source, None, served_name)
    folder = artifact_folder(source, options.keep if factorized else None)
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        with locked(lock):
            return _prepare_in(folder, source, served_name, options, console)
    except LockHeld as held:
        console.print(f"waiting for artifacts of {name}: {held}")
    with locked(lock, wait=True):
        return _prepare_in(folder, source, served_name, options, console)


def _prepare_in(
    folder: Path, source: Path, served_name: str, options: UpOptions, console: Console
) -> Artifacts:
    """Make the missing and damaged artifacts of a folder. The caller holds the folder's lock."""
    checkpoint = source
    codebooks = None
    if options.keep is not None and options.keep < 1.0:
        checkpoint = folder / _CHECKPOINT
        if checkpoint.exists() and not is_sealed(checkpoint):
            seal(checkpoint)  # an earlier version wrote it, atomically and without a seal
        if _needs_making(checkpoint, console):
            console.print(f"factorizing {source.name} at keep {options.keep} (once)")
            _make(
                *("compress", "--model", str(source), "--keep", str(options.keep)),
                *("--out", str(checkpoint), "--device", options.device),
                *("--held-out-chats", "0"),
            )
            seal(checkpoint)
    if options.wire_codec != "raw":
        codebooks = folder / _codebooks_name(options.kv_format)
        if _needs_making(codebooks, console):
            console.print(f"calibrating the codec for {source.name} (once, about a minute)")
            _make(
                *("calibrate", "--model", str(checkpoint), "--tokenizer", str(source)),
                *("--out", str(codebooks), "--kv-format", options.kv_format),
                *("--device", options.device),
            )
            seal(codebooks)
    return Artifacts(checkpoint, source, codebooks, served_name)


def _needs_making(artifact: Path, console: Console) -> bool:
    """Return whether an artifact must be made. A damaged one is reported and removed first."""
    if not artifact.exists():
        return True
    if is_intact(artifact):
        return False
    if is_sealed(artifact):
        console.print(f"[yellow]{artifact} is damaged[/]: it is made again")
    if artifact.is_dir():
        shutil.rmtree(artifact)
    else:
        artifact.unlink()
    return True


def _codebooks_name(kv_format: str) -> str:
    """Return the file name of the codebooks for one KV format.

    It changes with the content of a calibration, whose path may stay the same.

    Raises:
        SettingsError: the calibration cannot be read.
    """
    if kv_format == "dense":
        return f"codebooks-{CODEBOOKS}.json"
    name, _, path = kv_format.partition(":")
    identity = kv_format
    if path and is_calibrated(kv_format):
        try:
            # The hash of `runtime.kv.calibration.Artifact`, without importing torch.
            identity = f"{name}:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
        except OSError as error:
            raise SettingsError(
                f"cannot read the calibration of KV format {name}: {error}; create it with "
                f"`headrace calibrate --kv-format {name}`"
            ) from error
    return f"codebooks-{CODEBOOKS}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}.json"


def _make(*arguments: str) -> None:
    """Run a `headrace` command and wait for its end. Ctrl-C ends the command first.

    Raises:
        SettingsError: if it fails.
    """
    # The command may use all cores, even if workers are limited: no worker runs yet, or
    # `--dense-meanwhile` has given this process the lowest priority.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with subprocess.Popen(
        headrace_command(*arguments),
        stdout=_STDERR,  # its results are not those of `headrace up`
        env=environment,
        start_new_session=True,  # a terminal would send SIGINT to it as well
        preexec_fn=end_with_parent,
    ) as command:
        try:
            code = command.wait()
        except KeyboardInterrupt:
            command.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                command.wait(_INTERRUPT_S)
            command.kill()  # has no effect if it has ended
            raise
    if code != 0:
        raise SettingsError(f"`headrace {' '.join(arguments)}` failed, see its error above")
