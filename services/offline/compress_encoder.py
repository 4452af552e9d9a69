"""`headrace compress` for encoders: calibration with special tokens, comparison of embeddings."""

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.offline import compress as factorization
from runtime.offline.compress import Allocation, Method
from services.common.errors import SettingsError
from services.common.terminal import results
from services.offline.factorize import factorize, print_costs, progress_callback
from services.offline.output import write_encoder

ROW_TOKENS = 128
"""Tokens of a calibration row. Most texts that are embedded are shorter than the longest input."""
_ROWS_PER_ROW = 4
"""Calibration rows for one row of 512 tokens of a decoder."""


def compress_encoder(
    source: Path,
    dense: Checkpoint,
    keep: float,
    out: Path,
    method: Method,
    allocation: Allocation | None,
    rows: int,
    on: torch.device,
) -> None:
    """Factorize an encoder; see `services.offline.compress.compress` for the arguments.

    The files of sentence-transformers beside the weights, such as ``modules.json``, are copied.

    Raises:
        SettingsError: if the folder has no tokenizer.
    """
    count = rows * _ROWS_PER_ROW
    length = min(ROW_TOKENS, dense.config.context_length)
    tokenizer = _tokenizer_of(source)
    calibration, held_out = (
        _rows(tokenizer, text, length, number)
        for text, number in zip(
            factorization.documentation(), (count, max(count // 2, 1)), strict=True
        )
    )
    factorized, report = factorize(
        *(dense, calibration, keep, method, allocation, on, out),
        lambda made: write_encoder(made, [source], out),
    )
    with Progress(console=Console(stderr=True)) as progress:
        before, after = (
            factorization.embeddings(
                checkpoint, held_out, progress_callback(progress, f"embeddings, {name}"), on
            )
            for name, checkpoint in (("dense", dense), ("factorized", factorized))
        )
    table = Table("keep", "parameters kept", "factor pairs", "cosine similarity to dense")
    table.add_row(
        f"{report.keep:g}",
        f"{report.parameters_kept:.3f}",
        str(report.factorized),
        f"{factorization.similarity(before, after):.4f}",
    )
    results().print(table)
    print_costs(report, held_out)


def _tokenizer_of(source: Path) -> Tokenizer:
    path = source / "tokenizer.json"
    if not path.is_file():
        raise SettingsError(f"{source} has no tokenizer.json: copy that of the original model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises this type
        raise SettingsError(f"{path} cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _rows(tokenizer: Tokenizer, text: str, length: int, count: int) -> Tensor:
    """Return rows ``[count, length]`` of a text, each with the special tokens of an input."""
    special = tokenizer.encode("").ids
    encoded = tokenizer.encode(text, add_special_tokens=False).ids
    cut = factorization.cut_rows(encoded, length - len(special), count)
    # An input has its first special tokens before the text, and one after it.
    first, last = (torch.tensor(part).expand(len(cut), -1) for part in (special[:-1], special[-1:]))
    return torch.cat([first, cut, last], dim=1)
