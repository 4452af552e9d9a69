"""`headrace compress`: factorize a checkpoint, and report how far that changes the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from runtime.checkpoint import Checkpoint, load_checkpoint
from runtime.checkpoint.assemble import nbytes
from runtime.config import EncoderConfig
from runtime.models.build import build_model
from runtime.offline import compress as factorization
from runtime.offline.compress import Allocation, Method
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.common.terminal import results
from services.offline.chats import ChatFidelity, answer, as_text, compare_chats, questions
from services.offline.compress_encoder import compress_encoder
from services.offline.factorize import factorize, print_costs, progress_callback
from services.offline.output import has_modules, refuse_existing, write_encoder, write_model
from services.offline.real_kv import load_model
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer
from services.worker.device import torch_device

Choice = TypeVar("Choice", bound=StrEnum)

ROW_TOKENS, ROWS = 512, 32
CHATS, HELD_OUT_CHATS = 80, 40
ANSWER_TOKENS = 96
HELD_OUT_ANSWER_TOKENS = 192
"""Maximum tokens of a held-out answer: enough for loops to show."""


def compress(
    model: str,
    keep: float,
    out: Path,
    method: str = "fisher",
    ranks: str | None = None,
    rows: int = ROWS,
    device: str = "auto",
    *,
    chats: int = CHATS,
    held_out_chats: int = HELD_OUT_CHATS,
) -> None:
    """Factorize a model and write the factorized checkpoint to ``out``.

    The calibration text is one part of Python's documentation and, for up to half of the rows,
    answers of the model to fixed questions. Perplexity is measured on another part of the
    documentation, and answers to other questions are compared with those of the dense model.
    Generating answers needs the whole model on the device, and comparing them needs both models.
    Both are skipped for a model larger than the GPU. Everything else needs one layer at a time.
    Finished layers are kept in a folder beside ``out``: after an interruption, a call with the same
    arguments continues from them.

    An encoder is calibrated on documentation only, and its embeddings are compared. A decoder with
    the ``modules.json`` of sentence-transformers keeps that and the files that it names.

    Args:
        model: name or path of a checkpoint.
        keep: fraction of the parameters of the linear layers to keep.
        out: folder to write; it must not exist.
        method: value of `Method`.
        ranks: value of `Allocation`; None selects the method's default.
        rows: number of calibration rows of `ROW_TOKENS` tokens; perplexity uses half as many.
        device: auto, cpu or cuda.
        chats: maximum number of questions for calibration; 0 if there is no chat template.
        held_out_chats: maximum number of questions for the comparison; 0 for none.

    Raises:
        SettingsError: if an option is invalid, ``out`` exists, or the GPU has too little memory.
        CompressionError, CheckpointError: if the model cannot be read, factorized or written.
    """
    choice = parse_choice(Method, method), parse_choice(Allocation, ranks) if ranks else None
    on = torch_device(device)
    refuse_existing(out)
    source = resolve_model(model)
    with Console(stderr=True).status(f"reading {source.name}"):
        dense = load_checkpoint(source, dtype=None)
    if isinstance(dense.config, EncoderConfig):
        compress_encoder(source, dense, keep, out, *choice, rows, on)
    else:
        _compress_decoder(source, dense, keep, out, *choice, rows, on, chats, held_out_chats)


def _compress_decoder(
    source: Path,
    dense: Checkpoint,
    keep: float,
    out: Path,
    method: Method,
    allocation: Allocation | None,
    rows: int,
    on: torch.device,
    chats: int,
    held_out_chats: int,
) -> None:
    """Factorize a decoder; see `compress` for the arguments."""
    console = Console(stderr=True)
    tokenizer = load_tokenizer(source)
    if tokenizer.chat_template is None:
        chats = held_out_chats = 0
    elif chats + held_out_chats and is_larger_than(on, dense):
        console.print(f"{source.name} is larger than the GPU: using documentation only, no chats")
        chats = held_out_chats = 0
    with _reported_shortage("use --chats 0 or --device cpu"), console.status("answering questions"):
        calibration, held_out = _texts(source, tokenizer, rows, chats, on)
    with _reported_shortage("use --device cpu"):
        factorized, report = factorize(
            *(dense, calibration, keep, method, allocation, on, out),
            lambda made: _write(made, source, tokenizer, out),
        )
        before, after = _perplexities(dense, factorized, held_out, on, console)
    _print_report(report, held_out, before, after)
    if held_out_chats:
        with _reported_shortage(f"but {out} is complete"), console.status("comparing answers"):
            fidelity = _compared_chats(source, out, tokenizer, held_out_chats, on)
        _print_fidelity(fidelity)


def _write(factorized: Checkpoint, source: Path, tokenizer: Tokenizer, out: Path) -> None:
    if has_modules(source):
        write_encoder(factorized, [source], out)
    else:
        write_model(factorized, tokenizer, out)


def is_larger_than(device: torch.device, model: Checkpoint) -> bool:
    """Return whether the weights of a model in bf16 exceed the memory of a GPU."""
    if device.type == "cpu":
        return False
    _, total = torch.cuda.mem_get_info(device)
    return nbytes(model, torch.bfloat16) > total


def _texts(
    source: Path, tokenizer: Tokenizer, rows: int, chats: int, on: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ``rows`` rows of calibration text, and half as many of held-out text.

    The model's answers to ``chats`` questions replace up to half of the calibration rows.
    """
    chat_tokens: list[int] = []
    if chats:
        asked = questions()[0][:chats]
        chat_tokens = as_text(answer(load_model(source, on), tokenizer, asked, ANSWER_TOKENS))
    chat_rows = min(rows // 2, len(chat_tokens) // ROW_TOKENS)
    calibration, held_out = (
        factorization.cut_rows(tokenizer.encode(text), ROW_TOKENS, count)
        for text, count in zip(
            factorization.documentation(), (rows - chat_rows, rows // 2), strict=True
        )
    )
    if chat_rows:
        own = factorization.cut_rows(chat_tokens, ROW_TOKENS, chat_rows)
        calibration = torch.cat([calibration, own])
    return calibration, held_out


def _perplexities(
    dense: Checkpoint, factorized: Checkpoint, tokens: Tensor, on: torch.device, console: Console
) -> tuple[float, float]:
    with Progress(console=console) as progress:
        before, after = (
            factorization.perplexity(
                checkpoint, tokens, progress_callback(progress, f"perplexity, {name}"), on
            )
            for name, checkpoint in (("dense", dense), ("factorized", factorized))
        )
    return before, after


def _compared_chats(
    source: Path, out: Path, tokenizer: Tokenizer, chats: int, on: torch.device
) -> ChatFidelity:
    dense, factorized = (load_model(path, on, build=build_model) for path in (source, out))
    made = answer(dense, tokenizer, questions()[1][:chats], HELD_OUT_ANSWER_TOKENS)
    return compare_chats(dense, factorized, made, HELD_OUT_ANSWER_TOKENS)


@contextmanager
def _reported_shortage(advice: str) -> Iterator[None]:
    """Translate torch's error about too little free GPU memory.

    Args:
        advice: what to do, for the message.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SettingsError(f"too little free GPU memory, {advice}: {error}") from error


def parse_choice(choices: type[Choice], name: str) -> Choice:
    """Return the member of an enumeration with the value ``name``.

    Raises:
        SettingsError: if no member has this value.
    """
    try:
        return choices(name)
    except ValueError:
        raise SettingsError(f"{name!r} is unknown: choose one of {', '.join(choices)}") from None


def _print_report(
    report: "factorization.CompressionReport", held_out: Tensor, before: float, after: float
) -> None:
    table = Table("keep", "parameters kept", "factor pairs", "perplexity", "dense", "change")
    table.add_row(
        f"{report.keep:g}",
        f"{report.parameters_kept:.3f}",
        str(report.factorized),
        f"{after:.2f}",
        f"{before:.2f}",
        f"{after / before - 1:+.1%}",
    )
    results().print(table)
    print_costs(report, held_out)


def _print_fidelity(fidelity: ChatFidelity) -> None:
    table = Table("held-out chats", "top-1 agreement", "mean KL", "loops", "loops, dense")
    table.add_row(
        str(fidelity.chats),
        f"{fidelity.top1:.1%}",
        f"{fidelity.kl_mean:.4f}",
        str(fidelity.loops),
        str(fidelity.dense_loops),
    )
    results().print(table)
