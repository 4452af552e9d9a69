"""`headrace batch` with a gateway."""

import asyncio
import hashlib
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from services import cli
from services.batch import run as batch_run
from services.batch.answers import Answer
from services.batch.requests import BatchFileError, BatchRequest, RequestFile, check_requests
from services.batch.run import answer_file
from services.batch.sender import BatchStopped, InvalidServer, Server, send_all
from services.gateway.keys import ApiKeys, Tenant
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from tests.services.gateway.conftest import Site, gateway_site
from tests.services.gateway.fakes import say


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel.load(GatewaySettings.model_validate({"model": "smollm2-135m"}))


@asynccontextmanager
async def answering(
    model: ServedModel, keys: ApiKeys | None = None, pause_s: float = 0.0, **settings: Any
) -> AsyncIterator[Site]:
    """Run a gateway that answers each request with two tokens."""
    async with gateway_site(model, 1, keys, settings) as site:
        site.worker.script = say(*site.encode("Hello there"), pause_s=pause_s)
        yield site


def write_requests(folder: Path, count: int, **changes: Any) -> Path:
    """Write completions and chats, alternately."""
    message = {"role": "user", "content": "Hi"}
    texts = ("/v1/completions", {"prompt": "Hi", **changes})
    chats = ("/v1/chat/completions", {"messages": [message], **changes})
    lines = []
    for number in range(count):
        url, body = (texts, chats)[number % 2]
        lines.append({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body})
    file = folder / "in.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def read_answers(file: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = {record["custom_id"]: record for record in records}
    assert len(found) == len(records)
    return found


async def run(file: Path, output: Path, server: Server) -> int:
    return await asyncio.to_thread(answer_file, file, output, server)


async def test_every_request_is_answered(model: ServedModel, tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 20), tmp_path / "out.jsonl"
    async with answering(model) as site:
        assert await run(file, output, Server(f"{site.url}/v1", concurrency=4)) == 0
    answers = read_answers(output)
    assert set(answers) == {f"r{number}" for number in range(20)}
    for number in range(20):
        response = answers[f"r{number}"]["response"]
        choice = response["body"]["choices"][0]
        text = choice["message"]["content"] if number % 2 else choice["text"]
        assert (response["status_code"], text) == (200, "Hello there")
        assert response["body"]["id"].endswith(response["request_id"])


async def test_concurrency_is_bounded(model: ServedModel, tmp_path: Path) -> None:
    """A gateway that refuses a fourth request at once refuses none."""
    file, output = write_requests(tmp_path, 24), tmp_path / "out.jsonl"
    async with answering(model, pause_s=0.01, max_concurrent=3) as site:
        assert await run(file, output, Server(site.url, concurrency=3, retries=0)) == 0


async def test_refused_requests_are_sent_again(model: ServedModel, tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 6), tmp_path / "out.jsonl"
    async with answering(model, pause_s=0.05, max_concurrent=1) as site:
        assert await run(file, output, Server(site.url, concurrency=3)) == 0
        refused = site.metric("headrace_requests_total", endpoint="/v1/completions", status="429")
    assert len(read_answers(output)) == 6
    assert refused > 0


async def test_invalid_requests_have_the_error_of_the_server(
    model: ServedModel, tmp_path: Path
) -> None:
    file, output = write_requests(tmp_path, 4, temperature=9), tmp_path / "out.jsonl"
    async with answering(model) as site:
        assert await run(file, output, Server(site.url)) == 4
        before = output.read_bytes()
        assert await run(file, output, Server(site.url)) == 4  # lasting errors are not repeated
    assert output.read_bytes() == before
    for answer in read_answers(output).values():
        assert answer["response"]["status_code"] == 400
        assert answer["response"]["body"]["error"]["param"] == "temperature"


async def test_killed_run_continues(model: ServedModel, tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 40), tmp_path / "out.jsonl"
    async with answering(model, pause_s=0.02) as site:
        command = (sys.executable, "-m", "services.cli", "batch", str(file), "--url", site.url)
        options = ("--output", str(output), "--concurrency", "2")
        process = await asyncio.create_subprocess_exec(*command, *options)
        while not output.exists() or output.read_bytes().count(b"\n") < 5:
            assert process.returncode is None
            await asyncio.sleep(0.01)
        process.kill()
        await process.wait()
        with output.open("ab") as partial:
            partial.write(b'{"id":"batch_req_0')
        done = output.read_bytes().count(b"\n")
        assert done < 40
        sent = len(site.worker.streams)
        process = await asyncio.create_subprocess_exec(
            *command, *options, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await process.communicate()
        assert process.returncode == 0
        late = len(site.worker.streams) - sent - (40 - done)
        assert 0 <= late <= 2, "requests of the killed run that arrived after it"
    assert f"answered 40 requests, 0 with an error ({done} in earlier runs)" in printed.decode()
    assert len(read_answers(output)) == 40


async def test_wrong_key_stops_the_run(model: ServedModel, tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 40), tmp_path / "out.jsonl"
    keys = ApiKeys({hashlib.sha256(b"right").digest(): Tenant("team")})
    async with answering(model, keys) as site:
        with pytest.raises(BatchStopped, match="does not accept the API key"):
            await run(file, output, Server(site.url, api_key="wrong"))
        assert output.read_bytes() == b""
        assert await run(file, output, Server(site.url, api_key="right")) == 0


async def test_unreachable_server_stops_the_run(tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 3), tmp_path / "out.jsonl"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BatchStopped, match="cannot be reached"):
            await run(file, output, Server(url, retries=1))


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "127.0.0.1:8000",
        "ftp://localhost",
        "http://",
        "http://[::1",
        "http://localhost:0",
        "http://localhost:99999",
        "http://local host",
        "http://a..b",
        f"http://{'a' * 64}",
        "http://xn--a.de",
        "http://localhost/v1?key=x",
        "http://localhost\n",
    ],
)
def test_url_to_which_nothing_can_be_sent_is_refused(url: str) -> None:
    with pytest.raises(InvalidServer, match="is not the URL of a server"):
        Server(url)


@pytest.mark.parametrize(
    "url", ["http://localhost", "https://exa_mple:8000/proxy/v1/", "http://[::1]:80", "http://ö.de"]
)
def test_url_of_a_server_is_accepted(url: str) -> None:
    assert Server(url).url == url


@pytest.mark.parametrize("key", ["", "clé", "a\nb", "a\n", " a", "a\x7f"])
def test_api_key_that_is_no_header_value_is_refused(key: str) -> None:
    with pytest.raises(InvalidServer, match="the API key must be printable ASCII"):
        Server("http://localhost", key)


@pytest.mark.parametrize("arguments", [("--url", "localhost:8000"), ("--api-key", "clé")])
def test_unusable_server_is_a_wrong_argument(arguments: tuple[str, str], tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 1), tmp_path / "out.jsonl"
    command = ["batch", str(file), "--output", str(output), *arguments]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 2
    assert result.output.startswith("headrace batch: ")
    assert not output.exists()


async def test_first_error_of_nested_groups_is_raised() -> None:
    def fail(answer: Answer) -> None:
        raise ExceptionGroup("", [BatchFileError(answer.custom_id)])

    requests = iter([BatchRequest("r0", "/v1/completions", b"{}")])
    async with scripted(success()) as (url, _):
        with pytest.raises(BatchFileError, match="r0"):
            await send_all(Server(url), requests, fail)


@asynccontextmanager
async def scripted(*answers: web.Response | None) -> AsyncIterator[tuple[str, Counter[str]]]:
    """Run a server with these answers; None closes the connection. Yield its URL and calls."""
    calls: Counter[str] = Counter()
    left = list(answers)

    async def handle(request: web.Request) -> web.StreamResponse:
        calls[request.path] += 1
        answer = left.pop(0)
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return answer

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", calls
    await runner.cleanup()


def success() -> web.Response:
    return web.json_response({"id": "x"})


def refusal(status: int, after: str) -> web.Response:
    return web.json_response({"error": {}}, status=status, headers={"retry-after": after})


@pytest.mark.parametrize("change", ["truncated", "extended", "repeated"])
async def test_file_that_changes_during_the_run_is_an_error(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is larger than the buffer of its reader."""
    file = write_requests(tmp_path, 2, user="x" * 100_000)
    lines = file.read_bytes().splitlines(keepends=True)

    def check_then_change(requests: RequestFile) -> set[str]:
        found = check_requests(requests)
        if change == "truncated":
            os.truncate(file, len(lines[0]))
        elif change == "repeated":
            file.write_bytes(b"".join((*lines, lines[0])))
        else:
            file.write_bytes(b"".join((*lines, lines[0].replace(b"r0", b"r2"))))
        return found

    monkeypatch.setattr(batch_run, "check_requests", check_then_change)
    async with scripted(success(), success(), success()) as (url, _):
        with pytest.raises(BatchFileError, match=r"in.jsonl: the file changed"):
            await run(file, tmp_path / "out.jsonl", Server(url))


async def test_attempt_has_a_time_limit(tmp_path: Path) -> None:
    """The server sends bytes of an answer until the client disconnects."""
    file, output = write_requests(tmp_path, 1), tmp_path / "out.jsonl"
    disconnected = asyncio.Event()

    async def send_forever(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.05)
        disconnected.set()

    async with await asyncio.start_server(send_forever, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        options = Server(f"http://127.0.0.1:{port}", retries=0, timeout_s=3.0)
        assert await asyncio.wait_for(run(file, output, options), 60) == 1
        await asyncio.wait_for(disconnected.wait(), 60)
    assert read_answers(output)["r0"]["error"]["code"] == "connection_error"


@pytest.mark.parametrize(
    "failure", [refusal(429, "0"), refusal(503, "1"), refusal(502, "?"), None], ids=str
)
async def test_transient_failure_is_retried(failure: web.Response | None, tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 1), tmp_path / "out.jsonl"
    async with scripted(failure, success()) as (url, calls):
        assert await run(file, output, Server(url)) == 0
    assert calls == {"/v1/completions": 2}


async def test_last_failure_is_written_and_sent_again_by_the_next_run(tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 1), tmp_path / "out.jsonl"
    async with scripted(refusal(503, "0"), None, success()) as (url, _):
        assert await run(file, output, Server(url, retries=0)) == 1
        assert read_answers(output)["r0"]["response"]["status_code"] == 503
        assert await run(file, output, Server(url, retries=0)) == 1
        assert read_answers(output)["r0"]["error"]["code"] == "connection_error"
        assert await run(file, output, Server(url, retries=0)) == 0
        assert read_answers(output)["r0"]["error"] is None


async def test_answer_keeps_its_values_on_one_line(tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 1), tmp_path / "out.jsonl"
    text = '{\n  "n": 18446744073709551617,\r\n  "text": "a\\nb"\n}\n'
    async with scripted(web.Response(text=text)) as (url, _):
        assert await run(file, output, Server(url)) == 0
    assert read_answers(output)["r0"]["response"]["body"] == json.loads(text)


@pytest.mark.parametrize("levels", [300, 2000])
async def test_answer_with_many_levels_is_an_error(levels: int, tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 2), tmp_path / "out.jsonl"
    deep = "[" * levels + "]" * levels
    async with scripted(web.Response(text=deep), web.Response(text=deep, status=404)) as (url, _):
        assert await run(file, output, Server(url, concurrency=1)) == 2
    found = read_answers(output)
    assert found["r0"]["error"]["code"] == "invalid_response"
    assert found["r1"]["response"]["status_code"] == 404


async def test_answer_that_cannot_be_decompressed_is_an_error(tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 1), tmp_path / "out.jsonl"
    damaged = web.Response(body=b"{}", headers={"content-encoding": "gzip"})
    async with scripted(damaged) as (url, _):
        assert await run(file, output, Server(url)) == 1
    assert read_answers(output)["r0"]["error"]["code"] == "invalid_response"


async def test_answer_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    file, output = write_requests(tmp_path, 2), tmp_path / "out.jsonl"
    answers = (web.Response(text="<html>"), web.Response(text="<html>", status=404))
    async with scripted(*answers) as (url, _):
        assert await run(file, output, Server(url, concurrency=1)) == 2
    found = read_answers(output)
    assert found["r0"]["error"]["code"] == "invalid_response"
    assert found["r1"]["response"]["body"] == {"error": {"message": "<html>"}}
