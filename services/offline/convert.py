"""`headrace convert`: another code's checkpoint as a canonical one, with its tokenizer."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from runtime.checkpoint import Checkpoint, FactorPair
from runtime.checkpoint.safetensors_file import is_pickle
from runtime.checkpoint.sharing import basis_groups
from runtime.checkpoint.weights import linears_of
from runtime.convert import Source
from runtime.convert import convert as read
from services.common.model_source import resolve_model
from services.common.tokenizer import load_tokenizer
from services.offline.model_folder import refuse_existing, write_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def convert(model: str, out: Path, tokenizer: str | None, dtype: str) -> None:
    """Writes ``model``, of any family that is read, to ``out``.

    Args:
        tokenizer: where it is, if it is not beside the model.
        dtype: "auto" keeps the one that the weights are stored in.

    Raises:
        CheckpointError, TokenizerError: it cannot be read or written.
    """
    refuse_existing(out)
    source = resolve_model(model)
    beside = source.parent if is_pickle(source) else source
    words = load_tokenizer(resolve_model(tokenizer) if tokenizer else beside)
    made, found = read(source, _DTYPES.get(dtype))
    write_model(made, words, out)
    _show(made, found)


def _show(made: Checkpoint, found: Source) -> None:
    ranks = [
        linear.rank
        for layer in made.layers
        for _, linear in linears_of(layer)
        if isinstance(linear, FactorPair)
    ]
    table = Table("family", "stored in", "parameters kept", "factor pairs", "ranks", "shared bases")
    table.add_row(
        found.format,
        str(found.dtype).removeprefix("torch."),
        f"{made.keep:.3f}",
        str(len(ranks)),
        f"{min(ranks)} to {max(ranks)}" if ranks else "-",
        str(len(basis_groups(made))),
    )
    Console(stderr=True).print(table)
