"""Files of a run: one line per request as JSONL and CSV, and the summary as JSON."""

import csv
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import orjson

from loadgen.errors import UsageError
from loadgen.measures import MEASURES
from loadgen.record import Failure, Record

REQUESTS, TABLE, SUMMARY = "requests.jsonl", "requests.csv", "summary.json"
SWEEP, SWEEP_TABLE = "sweep.json", "sweep.csv"
COMPARISON = "comparison.json"
REPORT = "report.html"


def check_folder(folder: Path) -> None:
    """Check before a run that an output folder can be written, with a temporary file.

    The folder is not created: if it does not exist, the file is in the first parent that does.

    Raises:
        UsageError: if the folder cannot be written.
    """
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with TemporaryFile(dir=existing) as file:
            file.write(b"\n")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error


def write_run(folder: Path, records: Sequence[Record], summary: dict[str, Any]) -> None:
    """Write a run, creating the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / REQUESTS).open("wb") as lines:
        for record in records:
            lines.write(orjson.dumps(_fields(record), option=orjson.OPT_APPEND_NEWLINE))
    with (folder / TABLE).open("w", newline="") as table:
        rows = csv.writer(table)
        names = [measure.name for measure in MEASURES]
        rows.writerow(
            [
                *("number", "due", "outcome", "input_tokens", "output_tokens", *names),
                *("chat", "turn", "cached_tokens"),
            ]
        )
        for record in records:
            rows.writerow([
                record.number, record.due, _outcome(record), record.input_tokens,
                record.output_tokens, *(_mean(measure.of(record)) for measure in MEASURES),
                record.chat, record.turn, record.cached_tokens,
            ])  # fmt: skip
    (folder / SUMMARY).write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))


def read_run(folder: Path) -> tuple[list[Record], dict[str, Any]]:
    """Read a run written by `write_run`: its records and its summary.

    Raises:
        UsageError: if the folder holds no valid run.
    """
    try:
        summary = orjson.loads((folder / SUMMARY).read_bytes())
        with (folder / REQUESTS).open("rb") as lines:
            return [_record(orjson.loads(line)) for line in lines], summary
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} holds no run: {error}") from error


def read_sweep(folder: Path) -> dict[str, Any]:
    """Read the ``sweep.json`` written by `loadgen.sweep`.

    Raises:
        UsageError: if the folder holds no valid sweep.
    """
    try:
        sweep = orjson.loads((folder / SWEEP).read_bytes())
        if not sweep["points"]:
            raise ValueError("no rate was measured")
        return dict(sweep)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} holds no sweep: {error}") from error


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Record.__slots__}


def _record(fields: dict[str, Any]) -> Record:
    failure = fields.pop("failure")
    return Record(**fields, failure=None if failure is None else Failure(failure))


def _outcome(record: Record) -> str:
    if record.failure is not None:
        return str(record.failure)
    if record.cancelled:
        return "cancelled"
    return "succeeded" if record.succeeded else "unfinished"


def _mean(values: Sequence[float]) -> float | str:
    return sum(values) / len(values) if values else ""
