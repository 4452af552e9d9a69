"""Figures from runs of `headrace-loadgen` with a fixed number of requests in flight."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Self

from pydantic import ValidationError

from services.common.errors import SettingsError
from services.sizing.measured import DecodePoint, Figures, PrefillPoint

MAX_RUNNING = 256


@dataclass(frozen=True)
class _Run:
    """Means and medians of one closed loop. Times are in seconds.

    Attributes:
        started: date.
        concurrency: requests in flight.
        first_s: median time to the first token.
        token_s: median time per output token; None without answers of several tokens.
        decoding: share of a request's time that follows its first token.
    """

    folder: Path
    model: str
    started: str
    concurrency: int
    input_tokens: float
    output_tokens: float
    first_s: float
    token_s: float | None
    decoding: float

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the files of a run.

        Raises:
            SettingsError: if the folder holds no valid closed loop.
        """
        try:
            summary = json.loads((folder / "summary.json").read_bytes())
            with (folder / "requests.csv").open(newline="") as table:
                done = [row for row in csv.DictReader(table) if row["outcome"] == "succeeded"]
            if summary["invalid"]:
                raise SettingsError(f"the run in {folder} is invalid: {summary['invalid']}")
            if summary["concurrency"] is None:
                raise SettingsError(f"the run in {folder} is not a closed loop: use --concurrency")
            measures = summary["measures"]
            first, whole = measures["ttft_from_send"], measures["e2e_from_send"]["mean"]
            return cls(
                folder,
                str(summary["manifest"]["model"]),
                str(summary["manifest"]["started"])[:10],
                int(summary["concurrency"]),
                fmean(float(row["input_tokens"]) for row in done),
                fmean(float(row["output_tokens"]) for row in done),
                float(first["p50"]),
                float(measures["tpot"]["p50"]) if measures["tpot"] else None,
                (whole - first["mean"]) / whole,
            )
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise SettingsError(f"{folder} holds no run of headrace-loadgen: {error!r}") from error


def figures_of_runs(folders: Sequence[Path], kv_format: str) -> Figures:
    """Return figures of a deployment with one prefill and one decode worker.

    Runs with one request in flight give the points of prefill: median time to the first token by
    prompt tokens. All runs give those of decode: median time per output token. With c requests in
    flight, the mean number in decode is c times the share of a request's time that follows its
    first token.

    Args:
        folders: results of `headrace-loadgen run --out`.
        kv_format: KV format of the deployment.

    Raises:
        SettingsError: if a folder holds no closed loop, or the runs do not suffice.
    """
    runs = [_Run.read(folder) for folder in folders]
    if len({run.model for run in runs}) > 1:
        raise SettingsError("the runs measured different models")
    prefill = {round(run.input_tokens): run.first_s * 1e3 for run in runs if run.concurrency == 1}
    decode: dict[float, tuple[float, float]] = {}
    for run in sorted(runs, key=lambda run: run.input_tokens):
        if run.token_s is not None:
            sequences = 1.0 if run.concurrency == 1 else run.concurrency * run.decoding
            context = run.input_tokens + run.output_tokens / 2
            decode.setdefault(round(sequences, 1), (context, run.token_s * 1e3))
    if not prefill or not decode:
        raise SettingsError(
            "measure one request in flight (--concurrency 1) with answers of several tokens"
        )
    try:
        return Figures(
            name=runs[0].model,
            sources={"runs": ", ".join(f"{run.folder}, {run.started}" for run in runs)},
            prefill=[PrefillPoint(tokens=x, first_ms=y) for x, y in sorted(prefill.items())],
            decode={
                kv_format: [
                    DecodePoint(sequences=x, context=context, token_ms=y)
                    for x, (context, y) in sorted(decode.items())
                ]
            },
            max_running=MAX_RUNNING,
        )
    except ValidationError as error:
        raise SettingsError(f"the runs are not usable: {error}") from error
