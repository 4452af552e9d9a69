"""The file of API keys changes while the gateway runs."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from grpc import aio
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from headrace.v1 import inference_pb2, inference_pb2_grpc
from services.common import secret_files
from services.common.errors import Unauthenticated
from services.common.secret_metrics import SecretMetrics
from services.gateway.keys import ApiKeys, Tenant
from services.gateway.service import serve
from services.gateway.settings import GatewaySettings
from tests.ports import free_ports
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import say

LIMIT_S = 30


def line(key: str, name: str = "") -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()} {name}\n"


def write(file: Path, content: str) -> None:
    file.write_text(content)


def replace(file: Path, content: str) -> None:
    """Rename a new file to the path, as editors do."""
    draft = file.with_suffix(".swp")
    draft.write_text(content)
    draft.replace(file)


def replace_same_size_and_time(file: Path, content: str) -> None:
    before = file.stat()
    file.write_text(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def mount(file: Path, content: str) -> None:
    """Change the folder to which a link points, as a kubelet does for the files of a Secret."""
    number = len(list(file.parent.glob("..2*")))
    version = file.parent / f"..2026_{number}"
    version.mkdir()
    (version / file.name).write_text(content)
    draft = file.parent / "..data_tmp"
    draft.symlink_to(version.name)
    draft.replace(file.parent / "..data")
    if not file.is_symlink():
        file.symlink_to(Path("..data") / file.name)


def accepts(keys: ApiKeys, key: str) -> bool:
    try:
        return keys.tenant(f"Bearer {key}") is not None
    except Unauthenticated:
        return False


@pytest.mark.parametrize("change", [write, replace, replace_same_size_and_time, mount])
def test_changed_file_adds_and_removes_keys(
    change: Callable[[Path, str], None], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    (mount if change is mount else write)(file, line("kept") + line("old"))
    keys = ApiKeys.load(file)
    keys.refresh()
    change(file, line("kept") + line("new"))
    with capture_logs() as logs:
        for _ in range(3):
            keys.refresh()
    assert [accepts(keys, key) for key in ("kept", "new", "old")] == [True, True, False]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (record,) = logs
    assert (record["keys"], record["added"], record["removed"]) == (2, 1, 1)
    assert digest.startswith(record["sha256"])


def test_weight_and_name_of_a_key_change(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(line("sk", "a"))
    keys = ApiKeys.load(file)
    file.write_text(line("sk", "b weight=3"))
    keys.refresh(at_once=True)
    assert keys.tenant("Bearer sk") == Tenant("b", 3)


def test_content_is_used_once_it_is_read_twice_or_at_once(tmp_path: Path) -> None:
    """An editor may have written only a part of the file."""
    file = tmp_path / "keys"
    file.write_text(line("first") + line("second"))
    keys = ApiKeys.load(file)
    file.write_text(line("first"))
    keys.refresh()
    file.write_text(line("first") + line("third"))
    keys.refresh()
    assert accepts(keys, "second")
    keys.refresh()
    assert [accepts(keys, key) for key in ("first", "second", "third")] == [True, False, True]
    file.write_text(line("second"))
    keys.refresh(at_once=True)
    assert accepts(keys, "second")
    assert not accepts(keys, "first")


def empty(file: Path) -> None:
    file.write_text("")


def invalid(file: Path) -> None:
    file.write_text(line("new") + "no digest\n")


def not_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")


def missing(file: Path) -> None:
    file.unlink()


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (empty, "has no API key"),
        (invalid, "line 2: expected"),
        (not_text, "cannot read API keys"),
        (missing, "No such file"),
        (folder, "Is a directory"),
    ],
)
def test_file_with_faults_keeps_the_keys_and_is_reported_once(
    damage: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    registry = CollectorRegistry()
    file.write_text(line("old"))
    keys = ApiKeys.load(file)
    SecretMetrics(registry).observe([keys], None)

    def failed() -> float | None:
        return registry.get_sample_value("headrace_secret_files_failed", {"kind": keys.kind})

    assert failed() == 0
    damage(file)
    with capture_logs() as logs:
        for _ in range(4):
            keys.refresh()
        assert len(logs) == 1
        keys.refresh(at_once=True)
    assert len(logs) == 2, "an operator who sends SIGHUP sees the reason again"
    for record in logs:
        assert record["log_level"] == "error"
        assert reason in record["reason"]
    assert failed() == 1
    assert accepts(keys, "old")
    if damage is folder:
        file.rmdir()
    file.write_text(line("old"))
    keys.refresh()
    keys.refresh()
    assert failed() == 0


async def test_recent_requests_of_tenants_without_keys_are_dropped(
    open_site: OpenSite, tmp_path: Path
) -> None:
    """Otherwise each removed tenant would keep its last requests in memory for ever."""
    file = tmp_path / "keys"
    file.write_text(line("sk-old", "old") + line("sk-kept", "kept"))
    keys = ApiKeys.load(file)
    site: Site = await open_site(keys=keys)
    site.worker.script = say(5)

    async def complete(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "x"}
        return (await site.http.post("/v1/completions", json=body, headers=headers)).status_code

    assert [await complete(key) for key in ("sk-old", "sk-kept")] == [200, 200]
    file.write_text(line("sk-new", "new") + line("sk-kept", "kept"))
    keys.refresh(at_once=True)
    assert [await complete(key) for key in ("sk-old", "sk-new")] == [401, 200]
    recent = site.gateway.recent
    assert [len(recent.of(name).ended) for name in ("old", "kept", "new")] == [0, 1, 1]


async def test_unknown_key_is_named_by_its_digest(open_site: OpenSite, tmp_path: Path) -> None:
    """The digest leads to the line of the file, or of a former one; the key is not repeated."""
    file = tmp_path / "keys"
    file.write_text(line("sk-right"))
    site: Site = await open_site(keys=ApiKeys.load(file))
    headers = {"authorization": "Bearer sk-removed"}
    with capture_logs() as logs:
        answer = await site.http.get("/v1/models", headers=headers)
    beginning = line("sk-removed")[:8]
    assert answer.json()["error"]["message"].endswith(f"begins with {beginning}")
    (record,) = (entry for entry in logs if entry["event"] == "answered")
    assert beginning in record["error"]
    assert "sk-removed" not in str(logs) + answer.text


@pytest.fixture
def sighup() -> Iterator[None]:
    """Ignore SIGHUP, which would otherwise end the process of the tests if it is not handled."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.slow
@pytest.mark.parametrize("hang_up", [True, False], ids=["SIGHUP", "period"])
async def test_removed_key_stops_working_in_a_running_gateway(
    hang_up: bool, sighup: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_files, "PERIOD_S", 3600 if hang_up else 0.01)
    file, (port, grpc_port) = tmp_path / "keys", free_ports(2)
    file.write_text(line("removed") + line("kept"))
    given = {"port": port, "grpc_port": grpc_port, "api_keys_file": file}
    serving = asyncio.create_task(serve(GatewaySettings.model_validate(given)))
    url = f"http://127.0.0.1:{port}"
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
        aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
        asyncio.timeout(LIMIT_S),
    ):
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def answers(key: str) -> tuple[int, str]:
            """Return the statuses over HTTP and gRPC."""
            header = ("authorization", f"Bearer {key}")
            over_http = (await http.get("/v1/models", headers=dict([header]))).status_code
            try:
                await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=[header])
            except aio.AioRpcError as error:
                return over_http, error.code().name
            return over_http, "OK"

        assert [await answers(key) for key in ("removed", "kept")] == [(200, "OK")] * 2
        file.write_text(line("kept"))
        if hang_up:
            os.kill(os.getpid(), signal.SIGHUP)
        while await answers("removed") != (401, "UNAUTHENTICATED"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await answers("kept") == (200, "OK")
        metrics = (await http.get("/metrics")).text
        assert 'headrace_secret_files_failed{kind="api_keys"} 0.0' in metrics
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(LIMIT_S):
        await serving
