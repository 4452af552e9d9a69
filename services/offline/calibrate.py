"""`headrace calibrate`: calibrate codebooks on the KV of a model for real text."""

from pathlib import Path

from rich.console import Console

import codec
from runtime.compress import documentation
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.common.tokenizer import load_tokenizer
from services.offline.output import atomic_file
from services.offline.real_kv import load_model, prefill_sample
from services.worker.device import torch_device
from services.worker.loading import check_transferable


def calibrate(
    model: str, tokenizer: str, out: Path, *, kv_format: str = "dense", device: str = "auto"
) -> codec.Codebooks:
    """Prefill real text, calibrate a codebook for each encodable plane, and write them to ``out``.

    Args:
        model: name or path of a checkpoint.
        tokenizer: name or path of the model that has the tokenizer.
        out: file to write.
        kv_format: a name or ``module:Class``.
        device: auto, cpu or cuda.

    Raises:
        SettingsError, CheckpointError: if the model or the tokenizer cannot be read, or the KV
            format is compressed, has no encodable planes, or planes of several element types.
    """
    on = torch_device(device)
    console = Console(stderr=True)
    with console.status("loading the model"):
        if on.type == "cpu":
            codec.warm_up()  # compile once here; workers load the functions from the cache
        tokens = load_tokenizer(resolve_model(tokenizer)).encode(documentation()[0])
        runtime_model = load_model(resolve_model(model), on, kv_format)
        check_transferable(runtime_model)
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
