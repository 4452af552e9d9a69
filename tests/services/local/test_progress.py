"""Progress of the start-up, from the workers' logs to the terminal."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from runtime.checkpoint import write_checkpoint
from services.local.logs import poll_periodically
from services.local.progress import _STAGES, StartProgress
from services.worker.loading import load_worker
from services.worker.settings import WorkerSettings
from tests.runtime.tiny import tiny_checkpoint


def following(tmp_path: Path, *, terminal: bool = False) -> tuple[StartProgress, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200)
    logs = {name: tmp_path / f"{name}.log" for name in ("prefill-0", "decode-0")}
    return StartProgress(logs, console, console.status("starting")), output


def write(tmp_path: Path, name: str, *events: object) -> None:
    with (tmp_path / f"{name}.log").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def lines(output: io.StringIO) -> list[str]:
    return [line.split(" s  ")[1] for line in output.getvalue().splitlines()]


def test_each_new_stage_is_one_line_without_a_terminal(tmp_path: Path) -> None:
    progress, output = following(tmp_path)
    progress.poll()
    assert output.getvalue() == ""
    write(tmp_path, "decode-0", {"event": "reading checkpoint", "model": "m"})
    progress.poll()
    write(tmp_path, "prefill-0", {"event": "reading checkpoint"}, {"event": "model loaded"})
    write(tmp_path, "decode-0", {"event": "checkpoint read"}, {"event": "sizes"})
    progress.poll()
    progress.poll()
    warm = [
        {"event": "warmed up", "stage": stage, "size": size}
        for stage in ("prompts", "decode")
        for size in (8, 4)
    ]
    write(tmp_path, "decode-0", *warm, {"event": "kv pages"}, {"event": "ready"})
    progress.poll()
    assert lines(output) == [
        "decode-0: reading weights",
        "prefill-0: reading weights",
        "decode-0: copying weights to the device",
        "decode-0: warming up",
        "decode-0: warming up, prompts",
        "decode-0: warming up, decode",
        "decode-0: preparing transfers",
        "decode-0: ready",
    ]
    assert "ready:" not in output.getvalue(), "`up --detach` takes this for the end of the start"


def test_stages_of_a_worker_are_those_of_its_first_rank(tmp_path: Path) -> None:
    progress, output = following(tmp_path)
    for event in ("reading checkpoint", "checkpoint read", "sizes"):
        write(tmp_path, "decode-0", {"event": event}, {"event": "reading checkpoint", "rank": 1})
        progress.poll()
    assert lines(output) == [
        "decode-0: reading weights",
        "decode-0: copying weights to the device",
        "decode-0: warming up",
    ]


def test_other_lines_are_ignored_and_unfinished_lines_are_read_later(tmp_path: Path) -> None:
    progress, output = following(tmp_path)
    write(tmp_path, "decode-0", [], {"event": ["ready"]}, {"event": "warmed up"}, 3)
    path = tmp_path / "decode-0.log"
    path.write_bytes(path.read_bytes() + b'\xff human readable\n{"event": "rea')
    progress.poll()
    assert output.getvalue() == ""
    with path.open("a") as file:
        file.write('dy"}\n')
    progress.poll()
    assert lines(output) == ["decode-0: ready"]


def test_terminal_shows_all_workers_in_the_status_line(tmp_path: Path) -> None:
    progress, output = following(tmp_path, terminal=True)
    write(tmp_path, "decode-0", {"event": "warmed up", "stage": "prompts"})
    progress.poll()
    assert output.getvalue() == ""
    text = str(progress._status.status)
    assert text.endswith("s, prefill-0: starting; decode-0: warming up, prompts")


def test_following_ends_when_it_is_cancelled(tmp_path: Path) -> None:
    progress, output = following(tmp_path)
    write(tmp_path, "decode-0", {"event": "ready"})

    async def follow_for_a_while() -> None:
        async with asyncio.timeout(2.0):
            await poll_periodically(progress.poll)

    with pytest.raises(TimeoutError):
        asyncio.run(follow_for_a_while())
    assert lines(output) == ["decode-0: ready"]


def test_stages_are_events_of_a_worker(tmp_path: Path) -> None:
    write_checkpoint(tiny_checkpoint(), tmp_path / "model")
    settings = {"model": str(tmp_path / "model"), "device": "cpu", "codec": "raw"}
    with capture_logs() as logs:
        load_worker(WorkerSettings.model_validate(settings), decodes=True)
    logged = [log["event"] for log in logs]
    on_the_cpu = ["reading checkpoint", "checkpoint read", "sizes", "kv pages"]
    assert [event for event in logged if event in _STAGES] == on_the_cpu
