"""Start of a worker of several ranks: real processes, with the first rank in that of the test."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from torch import distributed

from runtime.checkpoint import Checkpoint, load_checkpoint
from runtime.engine import Add
from services.common.errors import SettingsError
from services.worker import model_loading
from services.worker.endpoints import open_endpoints
from services.worker.loading import load_worker, running_ranks
from services.worker.ranks.followers import RankFault
from services.worker.settings import WorkerSettings
from tests.ports import free_port
from tests.runtime.tiny import drive, request_of
from tests.services.tiny_model import save_tiny_model
from tests.services.worker.ranks import faulty_format

REQUESTS = (Add(request_of("a", 30, 12)), Add(request_of("b", 120, 6)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("ranks") / "tiny")


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Undo what a worker of several ranks does to its process, and check that no rank is left."""
    yield
    if not distributed.is_initialized():
        # A join that failed has counted its group. torch names the keys of the next rendezvous in
        # this process by that number, which only the end of a group resets.
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    distributed.destroy_process_group()
    left = [child for child in psutil.Process().children() if "spawn_main" in str(child.cmdline())]
    assert left == []


def settings_of(model: Path, tp: int, **changes: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            **{"model": str(model), "device": "cpu", "codec": "raw", "max_running": 4},
            **{"slots": 2, "slot_bytes": 1 << 16, "tp": tp, **changes},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
async def test_ranks_answer_like_one(model: Path, ranks: int) -> None:
    expected = drive(load_worker(settings_of(model, 1), decodes=True).engine, *REQUESTS).tokens
    settings = settings_of(model, ranks)
    async with (
        running_ranks(settings, "decode", decodes=True) as loaded,
        open_endpoints(loaded, "decode", settings.transfer_network) as endpoints,
    ):
        assert drive(loaded.engine, *REQUESTS).tokens == expected
        assert [*endpoints[0].kv_heads] == [0]
        names = [endpoint.readable.agent_name for endpoint in endpoints]
        first = f"decode-{loaded.identity.epoch}"
        assert names == [first, *(f"{first}-{rank}" for rank in range(1, ranks))]
        pids = loaded.followers.pids
        assert pids[0] == os.getpid()
        assert len(set(pids)) == ranks
        assert max(loaded.followers.stalled_s) < 1
    assert not any(psutil.pid_exists(pid) for pid in pids[1:] if pid)


@pytest.mark.slow
@pytest.mark.long
async def test_probes_name_the_ranks_that_start(model: Path) -> None:
    port = free_port()
    reasons: set[str] = set()

    async def watch() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                with suppress(httpx.TransportError):
                    for path in ("/ready", "/health"):
                        answer = await http.get(f"http://127.0.0.1:{port}{path}")
                        assert answer.status_code == 503
                        reasons.add(answer.json()["reason"])
                await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    async with running_ranks(settings_of(model, 2, health_port=port), "decode", decodes=True):
        assert not watching.done()
        watching.cancel()
    assert {f"rank 0 is loading, rank 1 is {stage}" for stage in ("starting", "loading")} <= reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("memory", SettingsError, "^rank 1: not enough GPU memory for .*: out of memory"),
        ("SIGKILL", RankFault, "^rank 1 was ended by SIGKILL"),
        pytest.param(
            "differs",
            SettingsError,
            "^rank 0: rank 1 differs: its kv_format_hash is 'another', not ''",
            marks=pytest.mark.long,
        ),
        pytest.param("bug", RankFault, r"^rank 1 failed: AttributeError\(", marks=pytest.mark.long),
        pytest.param("SIGSTOP", RankFault, "^rank 1 has not run for", marks=pytest.mark.long),
    ],
)
async def test_rank_that_does_not_start_ends_the_worker(
    model: Path,
    fault: str,
    kind: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(faulty_format.VARIABLE, fault)
    settings = settings_of(
        model, 2, kv_format=faulty_format.SPEC, rank_timeout_s=1 if fault == "SIGSTOP" else 60
    )
    with pytest.raises(kind, match=message):
        async with running_ranks(settings, "decode", decodes=True):
            pass


@pytest.mark.slow
async def test_more_ranks_than_heads_are_refused(model: Path) -> None:
    message = "^rank 0: cannot serve .*: 7 ranks, but the model has only 6 query heads"
    with pytest.raises(SettingsError, match=message):
        async with running_ranks(settings_of(model, 7), "decode", decodes=True):
            pass


@pytest.mark.slow
async def test_rank_that_reads_another_checkpoint_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is replaced with a copy after the first rank has read it."""
    shutil.copytree(model, tmp_path / "copy")
    current = tmp_path / "model"
    current.symlink_to(model)

    def replaced(*arguments: Any, **options: Any) -> Checkpoint:
        checkpoint = load_checkpoint(*arguments, **options)
        current.unlink()
        current.symlink_to(tmp_path / "copy")
        return checkpoint

    monkeypatch.setattr(model_loading, "load_checkpoint", replaced)
    message = "^rank 1: cannot serve .*: ranks of the worker read different files: .*config.json"
    with pytest.raises(SettingsError, match=message):
        async with running_ranks(settings_of(current, 2), "decode", decodes=True):
            pass
