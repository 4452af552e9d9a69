"""`headrace calibrate --kv-format fdc|palu|shard|kvquant`: calibrate a KV format on real text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from runtime.checkpoint import Checkpoint, load_checkpoint
from runtime.errors import CompressionError
from runtime.kv import fdc, kvquant, palu, shard
from runtime.kv.calibration import Artifact, KVMoments
from runtime.kv.compressed import CompressedFormat
from runtime.kv.registry import CALIBRATED, from_artifact
from runtime.models.build import build_model
from runtime.offline.compress import cut_rows, documentation
from runtime.offline.compress.kv_moments import kv_moments
from runtime.offline.quality.measure import bytes_per_token
from runtime.offline.quality.search import Constraint, Evaluator, Trial, search_rate
from runtime.pages.plan import PAGE_SIZE
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.common.terminal import results
from services.offline.calibrate_flags import Given, flag_of
from services.offline.output import atomic_file
from services.offline.texts import read_texts
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer
from services.worker.device import torch_device

TOKENS, ROW_TOKENS = 16_384, 2048
HELD_OUT_TOKENS = 1536
"""Tokens of the text on which removal rates are compared; never a part of the calibration."""
VALUE_SAMPLES = 1024
"""Tokens of each layer whose values are kept for the codebooks of `shard`."""
PAGE_SAMPLES = 128
"""Pages of each layer that are kept for the codes of `kvquant`."""
EVALUATIONS = 7

Calibrate = Callable[[Iterable[KVMoments], Any, str], Artifact]
_OPTIONS: dict[str, type[Any]] = {
    "fdc": fdc.FdcOptions,
    "palu": palu.PaluOptions,
    "shard": shard.ShardOptions,
    "kvquant": kvquant.KvQuantOptions,
}
_CALIBRATE: dict[str, Calibrate] = {
    "fdc": fdc.calibrate,
    "palu": palu.calibrate,
    "shard": shard.calibrate,
}


@dataclass(frozen=True)
class Options:
    """Options of a calibration.

    Attributes:
        of_format: options of the format.
        codes: options of the codes of its latents, or None to store them in bf16.
    """

    of_format: Any
    codes: kvquant.CodeOptions | None = None


@dataclass(frozen=True)
class RateSearch:
    """Search for the removal rate: its constraint, and its number of evaluations."""

    constraint: Constraint
    evaluations: int


def calibrate_kv(
    model: str, tokenizer: str, name: str, given: Given, out: Path, *, device: str = "auto"
) -> Artifact:
    """Measure a model on text, calibrate a KV format for it, and write the artifact to ``out``.

    Layers are computed one after another, and the device holds one of them. With a search for the
    removal rate, it also holds the whole model.

    Args:
        model: name or path of a checkpoint.
        tokenizer: name or path of the model that has the tokenizer.
        name: key of `runtime.kv.registry.CALIBRATED`.
        given: text, constraint and options of the format, where they differ from the defaults.
        out: file to write.
        device: auto, cpu or cuda.

    Raises:
        SettingsError: an option does not apply to this format, or a text cannot be read.
        RuntimeFault: the model cannot be read, an option is out of range, or no removal rate meets
            the constraint.
    """
    search = _rate_search(given.search)
    chosen = parse_options(name, given.options, search)
    on = torch_device(device)
    console = Console(stderr=True)
    source = resolve_model(model)
    with console.status(f"reading {source.name}"):
        checkpoint = load_checkpoint(source, dtype=None)
        train, held_out = _texts(
            load_tokenizer(resolve_model(tokenizer)),
            given.text.get("files") or (),
            given.text.get("tokens") or TOKENS,
            checkpoint.config.context_length,
            hold_out=search is not None,
        )
    moments = _moments(
        *(checkpoint, train, on, console),
        values=getattr(chosen.of_format, "values", "") == "vq",
        pages=chosen.codes is not None or name == "kvquant",
    )
    if search is not None:
        rate = _search(checkpoint, name, chosen, moments, held_out, search, on, console)
        chosen = replace(chosen, of_format=replace(chosen.of_format, removal_rate=rate))
    with console.status(f"calibrating {name}"):
        artifact = _artifact(name, moments, chosen, checkpoint, on)
    compressed = from_artifact(name, artifact, checkpoint.config, checkpoint.model_hash)
    with atomic_file(out) as draft:
        artifact.save(draft)
    report = results()
    report.print(_table(compressed, checkpoint, artifact, train))
    report.print(f"wrote {out}: --kv-format {name}:{out}", soft_wrap=True)
    return artifact


def parse_options(
    name: str, options: Mapping[str, Any], search: RateSearch | None = None
) -> Options:
    """Return the options of a format.

    Raises:
        SettingsError: an option does not apply to this format, or contradicts the search.
        KVFormatError: a value is out of range, or the format stores no latents to quantize.
    """
    kind = _OPTIONS[name]
    given = {k: v for k, v in options.items() if v is not None}
    codes = None
    if (bits := given.pop("quantize_bits", None)) is not None:
        kvquant.check_quantizable(name)
        if given.get("compressed_prefill"):
            raise SettingsError("--compressed-prefill cannot be combined with --quantize-bits")
        names = {"k_outliers", "v_outliers", "levels"} & set(given)
        codes = kvquant.CodeOptions(bits, **{key: given.pop(key) for key in names})
    known = {field.name for field in fields(kind)}
    for option in given:
        if option not in known:
            raise SettingsError(f"KV format {name} does not support {flag_of(option)}")
    if search is not None and "removal_rate" not in known:
        raise SettingsError(f"KV format {name} has no removal rate to search for")
    if search is not None and {"rank", "removal_rate"} & set(given):
        raise SettingsError("the search sets the removal rate: omit --rank and --removal-rate")
    return Options(kind(**given), codes)


def _rate_search(given: Mapping[str, Any]) -> RateSearch | None:
    """Return the search, or None if there is no constraint.

    Raises:
        SettingsError: the number of evaluations is given without a constraint.
        QualityError: a bound is out of range.
    """
    bounds = {k: v for k, v in given.items() if v is not None and k != "evaluations"}
    evaluations = given.get("evaluations")
    if bounds:
        return RateSearch(Constraint(**bounds), evaluations or EVALUATIONS)
    if evaluations is not None:
        raise SettingsError("--evaluations needs --max-ppl-increase or --min-fidelity")
    return None


def _texts(
    tokenizer: Tokenizer, files: Sequence[Path], tokens: int, context: int, *, hold_out: bool
) -> tuple[Tensor, Tensor]:
    """Return rows of calibration text and, if needed, one row of held-out text.

    Args:
        files: UTF-8 text files, joined in order, whose end is held out; empty for Python's
            documentation, of which some topics are held out.
        tokens: number of tokens to measure, at most.
        context: context length of the model.

    Raises:
        SettingsError: a file cannot be read, or the text is too short.
    """
    length = min(ROW_TOKENS, context, tokens)
    held_out_length = min(HELD_OUT_TOKENS, context) if hold_out else 0
    if files:
        found = tokenizer.encode(read_texts(files))
        end = len(found) - held_out_length
        train, held_out = found[:end], found[end:]
    else:
        train, held_out = (tokenizer.encode(part) for part in documentation())
    try:
        rows = cut_rows(train, length, tokens // length)
        return rows, cut_rows(held_out, held_out_length, 1) if hold_out else rows[:0]
    except CompressionError as error:
        raise SettingsError(f"the calibration text is too short: {error}") from error


def _moments(
    checkpoint: Checkpoint,
    rows: Tensor,
    on: torch.device,
    console: Console,
    *,
    values: bool,
    pages: bool,
) -> list[KVMoments]:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"measuring {rows.numel():,} tokens", total=1.0)
        update = partial(progress.update, task)
        samples = VALUE_SAMPLES if values else 0, PAGE_SAMPLES if pages else 0
        return list(kv_moments(checkpoint, rows, on, lambda done: update(completed=done), *samples))


def _artifact(
    name: str,
    moments: Sequence[KVMoments],
    options: Options,
    checkpoint: Checkpoint,
    on: torch.device,
) -> Artifact:
    """Calibrate a format, and its codes if it has any.

    Args:
        on: device of the moments.
    """
    config, model_hash = checkpoint.config, checkpoint.model_hash
    if name == "kvquant":
        return kvquant.calibrate(moments, options.of_format, model_hash, config, on)
    artifact = _CALIBRATE[name](moments, options.of_format, model_hash)
    if options.codes is None:
        return artifact
    latents = CALIBRATED[name](config, artifact, model_hash, on)
    return kvquant.quantize_latents(artifact, latents, moments, options.codes)


def _search(
    checkpoint: Checkpoint,
    name: str,
    options: Options,
    moments: Sequence[KVMoments],
    held_out: Tensor,
    search: RateSearch,
    on: torch.device,
    console: Console,
) -> float:
    dtype = torch.float32 if on.type == "cpu" else torch.bfloat16
    with console.status("computing the held-out text with exact KV"):
        model = build_model(checkpoint, device=on, dtype=dtype, page_size=PAGE_SIZE)
        evaluator = Evaluator(model, held_out)

    @lru_cache(maxsize=1)  # the report uses the calibration that was evaluated
    def made(rate: float) -> CompressedFormat:
        with_rate = replace(options, of_format=replace(options.of_format, removal_rate=rate))
        artifact = _artifact(name, moments, with_rate, checkpoint, on)
        return from_artifact(name, artifact, checkpoint.config, device=on)

    def report(trial: Trial) -> None:
        found = trial.quality
        size = bytes_per_token(made(trial.rate), checkpoint.config, PAGE_SIZE)
        console.print(
            f"removal rate {trial.rate:.4f}: {size:,.0f} bytes per token, perplexity "
            f"{found.perplexity_change:+.2%} ({found.change_low:+.2%} to {found.change_high:+.2%})"
            f", fidelity {found.top1:.2%}: {'met' if trial.met else 'missed'}",
            highlight=False,
            soft_wrap=True,
        )

    with console.status(f"searching the removal rate on {held_out.numel()} held-out tokens"):
        return search_rate(
            lambda rate: evaluator(made(rate)), search.constraint, search.evaluations, report
        )


def _table(
    compressed: CompressedFormat, checkpoint: Checkpoint, artifact: Artifact, rows: Tensor
) -> Table:
    """Return the bytes per token, the compression ratio and the ranks of each layer."""
    config = checkpoint.config
    dense = 2 * 2 * config.num_kv_heads * config.head_dim
    total = bytes_per_token(compressed, config, PAGE_SIZE)
    bases = sum(tensor.nbytes for tensor in artifact.tensors.values())
    table = Table(
        title=f"KV format {compressed.name} version {compressed.version}, "
        f"{rows.numel():,} tokens in rows of {rows.shape[1]:,}",
        caption=f"artifact hash {artifact.hash[:16]}, {bases / 1e6:.1f} MB; dense: {dense:,} bytes "
        "per token and layer",
        show_footer=True,
    )
    table.add_column("layer", "all", justify="right")
    table.add_column("bytes per token", f"{total:,.0f}", justify="right")
    table.add_column("ratio", f"{config.num_layers * dense / total:.2f}x", justify="right")
    table.add_column(
        "ranks per KV head" if compressed.name in kvquant.LATENT_FORMATS else "K and V"
    )
    for layer in range(config.num_layers):
        size = _layer_bytes(compressed, layer)
        table.add_row(str(layer), f"{size:,}", f"{dense / size:.2f}x", compressed.describe(layer))
    return table


def _layer_bytes(compressed: CompressedFormat, layer: int) -> int:
    return sum(
        plane.shape[0] * plane.shape[2] * plane.dtype.itemsize
        for plane in compressed.planes(layer, PAGE_SIZE)
    )
