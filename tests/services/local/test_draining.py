"""The number of requests that a stop waits for, from the gateways' logs to the terminal."""

import io
import json
from pathlib import Path

from rich.console import Console

from services.local.draining import DrainProgress


def write(path: Path, **event: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")


def draining(folder: Path) -> tuple[DrainProgress, io.StringIO]:
    output = io.StringIO()
    return DrainProgress(folder, Console(file=output, width=200), "Ctrl-C to stop now"), output


def test_running_requests_of_all_gateways_are_printed(tmp_path: Path) -> None:
    first, second = tmp_path / "gateway.log", tmp_path / "gateway-1.log"
    write(first, event="draining", requests=9)  # of an earlier stop
    second.touch()
    progress, output = draining(tmp_path)
    with progress:
        progress.poll()
        assert output.getvalue() == ""
        write(first, event="draining", requests=1)
        progress.poll()
        progress.poll()
        write(second, event="draining", requests=2)
        progress.poll()
    assert output.getvalue().splitlines() == [
        "draining 1 request, Ctrl-C to stop now",
        "draining 3 requests, Ctrl-C to stop now",
    ]


def test_nothing_is_printed_without_requests(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.touch()
    progress, output = draining(tmp_path)
    write(log, event="draining", requests=0)
    write(log, event="draining")
    progress.poll()
    assert output.getvalue() == ""
