"""`headrace calibrate`: calibrate codebooks on the KV of a model for real text."""

from pathlib import Path

from rich.console import Console

import codec
from runtime.checkpoint import load_checkpoint
from runtime.compress import documentation
from runtime.models.model import Model
from services.common.model_source import resolve_model
from services.common.tokenizer import load_tokenizer
from services.offline.output import atomic_file
from services.offline.real_kv import prefill_sample
from services.worker.loading import PAGE_SIZE


def calibrate(model: str, tokenizer: str, out: Path) -> codec.Codebooks:
    """Prefill real text, calibrate a codebook for each plane, and write all of them to ``out``.

    Args:
        model: name or path of a checkpoint.
        tokenizer: name or path of the model that has the tokenizer.
        out: file to write.

    Raises:
        SettingsError, CheckpointError: if the model or the tokenizer cannot be read.
    """
    console = Console(stderr=True)
    with console.status("loading the model, compiling the codec"):
        codec.warm_up()  # compile once here; workers load the functions from the cache
        tokens = load_tokenizer(resolve_model(tokenizer)).encode(documentation()[0])
        runtime_model = Model(load_checkpoint(resolve_model(model)), page_size=PAGE_SIZE)
    codebooks = codec.calibrate_model(prefill_sample(runtime_model, tokens, console))
    with atomic_file(out) as draft:
        codebooks.save(draft)
    return codebooks
