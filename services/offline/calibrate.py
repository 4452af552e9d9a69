"""`headrace calibrate`: calibrate codebooks on the KV of a model for real text."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

import codec
from runtime.offline.compress import documentation
from services.common.errors import SettingsError
from services.common.interpreter import python_command
from services.common.model_source import resolve_model
from services.offline.output import atomic_file
from services.offline.real_kv import SAMPLE_PROMPTS, SAMPLE_TOKENS, prefill_sample, stream_model
from services.offline.texts import read_texts
from services.tokenizer.loading import load_tokenizer
from services.worker.device import torch_device

# Not `preexec_fn`: it forks this process, which may have threads of gRPC.
_COMPILE = """
from services.common.signals import end_with_parent
end_with_parent()
import codec
codec.warm_up()
"""


def calibrate(
    model: str,
    tokenizer: str,
    out: Path,
    *,
    kv_format: str = "dense",
    device: str = "auto",
    texts: Sequence[Path] = (),
) -> codec.Codebooks:
    """Prefill real text, calibrate a codebook for each encodable plane, and write them to ``out``.

    Args:
        model: name or path of a checkpoint.
        tokenizer: name or path of the model that has the tokenizer.
        out: file to write.
        kv_format: a name or ``module:Class``.
        device: auto, cpu or cuda.
        texts: UTF-8 text files, joined in order; empty for Python's documentation.

    Raises:
        SettingsError, CheckpointError: if the model, the tokenizer or a text cannot be read, the
            text is too short, or the KV format has no encodable planes, or planes of several
            element types.
    """
    on = torch_device(device)
    console = Console(stderr=True)
    with _codec_compiled() if on.type == "cpu" else nullcontext():
        with console.status("loading the model"):
            text = read_texts(texts) if texts else documentation()[0]
            tokens = load_tokenizer(resolve_model(tokenizer)).encode(text)
            if len(tokens) < (least := SAMPLE_PROMPTS * SAMPLE_TOKENS):
                raise SettingsError(
                    f"the calibration text has {len(tokens)} tokens, at least {least} are needed"
                )
            runtime_model = stream_model(resolve_model(model), on, kv_format)
        samples = prefill_sample(runtime_model, tokens, console)
    if not samples:
        raise SettingsError(f"KV format {kv_format} has no planes to encode: use --codec raw")
    try:
        codebooks = codec.Codebooks.of(
            {key: codec.calibrate(sample, sample.dtype) for key, sample in samples.items()}
        )
    except codec.CodecError as error:
        raise SettingsError(f"KV format {kv_format} cannot be calibrated: {error}") from error
    with atomic_file(out) as draft:
        codebooks.save(draft)
    return codebooks


@contextmanager
def _codec_compiled() -> Iterator[None]:
    """Compile the codec for the CPU in another process while the block runs.

    Workers load the compiled functions from numba's cache. If it is empty, compilation takes 20 s.

    Raises:
        SettingsError: if it fails.
    """
    with subprocess.Popen(python_command("-c", _COMPILE)) as compiler:
        try:
            yield
        except BaseException:
            compiler.kill()
            raise
    if compiler.returncode != 0:
        raise SettingsError(f"compiling the codec failed: exit code {compiler.returncode}")
