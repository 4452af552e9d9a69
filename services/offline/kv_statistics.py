"""`headrace kv-statistics`: exponents of a model's real KV and compression ratios by mode."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

import codec
from runtime.offline.compress import documentation
from services.common.model_source import resolve_model
from services.common.terminal import results
from services.offline.kv_measure import MODES, KVStatistics, PlaneStatistics, measure, rounded
from services.offline.real_kv import prefill_sample, stream_model
from services.tokenizer.loading import load_tokenizer
from services.worker.device import torch_device


def kv_statistics(
    model: str, tokenizer: str, out: Path, *, keep_kv: bool = False, device: str = "auto"
) -> KVStatistics:
    """Calibrate codebooks on one text and measure them on another.

    Writes ``statistics.json``, ``table.md`` and ``kv_ratio.svg``.

    Args:
        model: name or path of a checkpoint.
        tokenizer: name or path of the model that has the tokenizer.
        out: folder to write to.
        keep_kv: whether to write the planes in bf16 to ``kv.pt``, for the codec's benchmark.
        device: device of the model: auto, cpu or cuda. The codec runs on the CPU.

    Raises:
        SettingsError: if matplotlib is missing, before anything is computed.
        SettingsError, CheckpointError: if the model or the tokenizer cannot be read.
    """
    from services.offline.kv_plot import draw  # matplotlib is an optional dependency

    on = torch_device(device)
    console = Console(stderr=True)
    with console.status("loading the model, compiling the codec"):
        codec.warm_up()
        encoder = load_tokenizer(resolve_model(tokenizer))
        runtime_model = stream_model(resolve_model(model), on)
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
        torch.save({"calibration": rounded(calibration), "test": rounded(test)}, out / "kv.pt")
    results().print(f"wrote {out}/statistics.json, table.md, kv_ratio.svg", soft_wrap=True)
    return statistics


def tables(statistics: KVStatistics) -> str:
    """Return two Markdown tables: the totals, and a row for each layer.

    The ratio of the mode that calibration picked is bold. The columns "escapes" show
    two percentages of the three-bit mode: all escapes / listed escapes.
    """
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
