"""`headrace kv-statistics`: exponents of a model's real KV, and the ratio of each mode."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

import codec
from codec import Codebook, Mode
from codec.calibrate import Histogram
from runtime.checkpoint import load_checkpoint
from runtime.compress import documentation
from runtime.models.model import Model
from services.common.errors import SettingsError
from services.common.model_source import resolve_model
from services.common.tokenizer import load_tokenizer
from services.offline.real_kv import prefill_sample
from services.worker.loading import PAGE_SIZE

MODES = {"top16": Mode.TOP16, "in-band": Mode.INBAND, "three-bit": Mode.THREE_BIT}
PICKED = "calibrated"
"""In totals: each plane in the mode that its calibration picked."""
_ELEMENT_BITS = 16

Planes = Mapping[tuple[int, str], Tensor]


class PlottingMissing(SettingsError):
    """Matplotlib, which only the plot needs, is not installed; the message says how to get it."""


@dataclass(frozen=True)
class Coding:
    """How one set of codebooks does on KV that it was not calibrated on.

    Attributes:
        escapes: share of the elements whose exponent has no code.
        listed: share of those that have no second-level code either, and take a word each.
        payload_bytes: of the encoded segment: header, starts, streams, entries, padding.
        ratio: raw bytes / `payload_bytes`.
    """

    escapes: float
    listed: float
    payload_bytes: int
    ratio: float


@dataclass(frozen=True)
class PlaneStatistics:
    """K or V of one layer, each coding measured in a segment of its own.

    Attributes:
        exponents: biased exponent → how often it occurs in the test text.
        entropy_ratio: the order-0 bound: 16 / (entropy of `exponents` + 8 bits of sign, mantissa).
        picked: the mode that calibration picks; a key of `codings`.
    """

    layer: int
    plane: str
    exponents: dict[int, int]
    entropy_ratio: float
    picked: str
    codings: dict[str, Coding]


@dataclass(frozen=True)
class KVStatistics:
    """All planes, and totals over one segment that holds them all.

    Attributes:
        calibration_tokens, test_tokens: of two texts that share nothing.
        entropy_ratio: the bound with an own distribution for each plane: 16 / mean of their bits.
        total: by mode, and `PICKED`.
    """

    calibration_tokens: int
    test_tokens: int
    planes: tuple[PlaneStatistics, ...]
    entropy_ratio: float
    total: dict[str, Coding]


def kv_statistics(model: str, tokenizer: str, out: Path, *, keep_kv: bool = False) -> KVStatistics:
    """Measures on held-out text; writes ``statistics.json``, ``table.md`` and ``kv_ratio.svg``.

    With ``keep_kv`` also ``kv.pt``, the planes in bf16, which the codec's benchmark can take.

    Raises:
        PlottingMissing: before anything is computed.
        SettingsError, CheckpointError: the model or the tokenizer cannot be read.
    """
    from services.offline.kv_plot import draw

    console = Console(stderr=True)
    with console.status("loading the model, compiling the codec"):
        codec.warm_up()
        encoder = load_tokenizer(resolve_model(tokenizer))
        runtime_model = Model(load_checkpoint(resolve_model(model)), page_size=PAGE_SIZE)
    calibration, test = (
        prefill_sample(runtime_model, encoder.encode(text), console) for text in documentation()
    )
    with console.status("encoding"):
        statistics = measure(calibration, test)
    out.mkdir(parents=True, exist_ok=True)
    (out / "statistics.json").write_text(json.dumps(asdict(statistics), indent=1) + "\n")
    (out / "table.md").write_text(tables(statistics))
    draw(statistics, out / "kv_ratio.svg")
    if keep_kv:
        torch.save({"calibration": _rounded(calibration), "test": _rounded(test)}, out / "kv.pt")
    console.print(f"wrote {out}/statistics.json, table.md, kv_ratio.svg")
    return statistics


def measure(calibration: Planes, test: Planes) -> KVStatistics:
    """Calibrates on one sample, encodes the other, decodes it again.

    Args:
        calibration, test: (layer, "k" or "v") → ``[page, kv_head, slot, dim]``, the same keys, in
            any floating dtype, rounded to bf16; every slot counts.

    Raises:
        CodecError: the tensors do not fit one another, or a payload does not decode to its content.
    """
    books: dict[str, list[Codebook]] = {
        name: [codec.calibrate(calibration[key], mode=mode) for key in test]
        for name, mode in (*MODES.items(), (PICKED, None))
    }
    tensors = _rounded(test)
    histograms = [Histogram.of(tensor, torch.bfloat16) for tensor in tensors]
    names = {mode: name for name, mode in MODES.items()}
    planes = tuple(
        PlaneStatistics(
            *key,
            {exponent: count for exponent, count in enumerate(histogram.counts) if count},
            _ELEMENT_BITS / histogram.entropy_bits(),
            names[books[PICKED][at].mode],
            {name: _coding([tensor], [histogram], [books[name][at]]) for name in MODES},
        )
        for at, (key, tensor, histogram) in enumerate(zip(test, tensors, histograms, strict=True))
    )
    mean_bits = sum(histogram.entropy_bits() for histogram in histograms) / len(histograms)
    return KVStatistics(
        _tokens(calibration),
        _tokens(test),
        planes,
        _ELEMENT_BITS / mean_bits,
        {name: _coding(tensors, histograms, of_mode) for name, of_mode in books.items()},
    )


def _rounded(planes: Planes) -> list[Tensor]:
    return [plane.to(torch.bfloat16) for plane in planes.values()]


def _tokens(planes: Planes) -> int:
    pages, _, slots, _ = next(iter(planes.values())).shape
    return pages * slots


def _coding(
    planes: Sequence[Tensor], histograms: Sequence[Histogram], books: Sequence[Codebook]
) -> Coding:
    """Encodes the planes into one segment."""
    pages, heads, slots, dim = planes[0].shape
    tokens = pages * slots
    bound = codec.max_segment_bytes(len(planes), heads, dim, tokens, slots)
    payload = torch.empty(bound, dtype=torch.uint8)
    encoded = codec.encode_pages(planes, books, range(pages), tokens, payload)
    decoded = [torch.empty_like(plane) for plane in planes]
    codec.decode_pages(payload[: encoded.length], decoded, books, range(pages), tokens)
    elements = sum(histogram.total for histogram in histograms)
    listed = sum(
        histogram.total - sum(histogram.counts[e] for e in (*book.exponents, *book.second))
        for histogram, book in zip(histograms, books, strict=True)
    )
    return Coding(
        encoded.escapes / elements,
        listed / elements,
        encoded.length,
        encoded.raw_bytes / encoded.length,
    )


def tables(statistics: KVStatistics) -> str:
    """Markdown: the totals, then a row for each layer. The mode that calibration picks is bold;
    escapes, and those of them that are listed, are three-bit's, in percent."""
    lines = [
        "| all planes in one segment | ratio | escapes | listed |",
        "|---|---|---|---|",
    ]
    for name, coding in statistics.total.items():
        rates = f"{100 * coding.escapes:.3f} % | {100 * coding.listed:.4f} %"
        lines.append(f"| {name} | {coding.ratio:.4f} | {rates} |")
    lines += [f"| order-0 entropy | {statistics.entropy_ratio:.4f} | | |", ""]

    header = "".join(
        f" {plane} {name} |" for plane in "KV" for name in (*MODES, "bound", "escapes")
    )
    lines += [f"| layer |{header}", "|---" * (1 + 2 * (len(MODES) + 2)) + "|"]
    layers: dict[int, str] = {}
    for plane in statistics.planes:
        layers[plane.layer] = layers.get(plane.layer, f"| {plane.layer} |") + _cells(plane)
    return "\n".join([*lines, *layers.values()]) + "\n"


def _cells(plane: PlaneStatistics) -> str:
    ratios = {name: f"{coding.ratio:.3f}" for name, coding in plane.codings.items()}
    ratios[plane.picked] = f"**{ratios[plane.picked]}**"
    three_bit = plane.codings["three-bit"]
    rates = f"{100 * three_bit.escapes:.1f} / {100 * three_bit.listed:.4f}"
    cells = *ratios.values(), f"{plane.entropy_ratio:.3f}", rates
    return "".join(f" {cell} |" for cell in cells)
