"""Finding the API of a target by a URL that may lack ``/v1``."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from loadgen.errors import UsageError
from loadgen.target.api import Api, find_api
from tests.loadgen.command import loadgen
from tests.loadgen.synthetic import Behaviour, closed_port, serving

LIST = '{"data": [{"id": "one"}, {"id": "two"}]}'


@contextmanager
def answering(routes: dict[str, tuple[int, str]], asked: list[str] | None = None) -> Iterator[str]:
    """Serve status and body by path, 404 elsewhere, and append the paths of requests to a list."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if asked is not None:
                asked.append(self.path)
            status, body = routes.get(self.path, (404, "404 page not found"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("given", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("model", [None, "mine"])
def test_missing_version_is_found(given: str, model: str | None) -> None:
    with answering({"/v1/models": (200, LIST), "/": (200, "running")}) as url:
        assert find_api(url + given, model) == Api(f"{url}/v1", model or "one")


def test_root_of_another_path_is_found() -> None:
    with answering({"/openai/v1/models": (200, LIST), "/api/models": (200, LIST)}) as url:
        assert find_api(f"{url}/openai").url == f"{url}/openai/v1"
        assert find_api(f"{url}/api").url == f"{url}/api"


def test_top_is_the_root_if_it_lists_models_and_v1_does_not() -> None:
    with answering({"/models": (200, LIST)}) as url:
        assert find_api(url).url == url
    with answering({"/models": (200, LIST), "/v1/models": (200, LIST)}) as url:
        assert find_api(url).url == f"{url}/v1"


def test_given_root_and_model_are_used_without_a_request() -> None:
    asked: list[str] = []
    with answering({}, asked) as url:
        assert find_api(f"{url}/v1", "mine") == Api(f"{url}/v1", "mine")
        assert not asked
        assert find_api(url, "mine") == Api(url, "mine"), "a server without a list of models"
    with closed_port() as url:
        assert find_api(f"{url}/v1", "mine").model == "mine"


def test_each_replica_is_found() -> None:
    with answering({"/v1/models": (200, LIST)}) as one, answering({"/v1/models": (200, LIST)}) as b:
        assert find_api(f"{one},{b}/v1") == Api(f"{one}/v1,{b}/v1", "one")
        assert find_api(f"grpc://127.0.0.1:1,{b}").url == f"grpc://127.0.0.1:1,{b}/v1"


@pytest.mark.parametrize(
    ("routes", "why"),
    [
        ({}, "no list of models at {url}/v1/models (status 404) or {url}/models (status 404)"),
        ({"/v1/models": (200, "<html>")}, "{url}/v1/models (not a list of models)"),
        ({"/v1/models": (200, "[]")}, "{url}/v1/models (not a list of models)"),
        ({"/v1/models": (200, '{"data": []}')}, "{url}/v1/models (an empty list)"),
        ({"/v1/models": (503, "loading")}, "{url}/v1/models (status 503)"),
        (
            {"/v1/models": (401, "")},
            "{url}/v1/models answered 401: give a valid key with --api-key",
        ),
    ],
)
def test_error_names_what_was_tried(routes: dict[str, tuple[int, str]], why: str) -> None:
    with answering(routes) as url, pytest.raises(UsageError) as error:
        find_api(url.replace("//", "//user:secret@"))
    assert why.format(url=url) in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000 is not a URL such as http://host:8000/v1"),
        ("http://", "is not a URL"),
        ("http://host:port/v1", "is not a URL"),
        (
            "http://host/v1/chat/completions",
            "is an endpoint: give the root of the API, http://host/v1",
        ),
    ],
)
def test_unusable_url_is_explained(url: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        find_api(url)


def test_unreachable_server_is_not_a_missing_model() -> None:
    with closed_port() as url, pytest.raises(UsageError) as error:
        find_api(url)
    assert str(error.value).startswith(f"cannot reach {url}/v1: ")


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured requests are sent directly, so what precedes them must be, too."""
    with closed_port() as proxy, serving(Behaviour()) as server:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "grpc_proxy"):
            monkeypatch.setenv(name, proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        load = ("--input", "fixed:5", "--output", "fixed:2", "--rate", "50", "--requests", "2")
        for target in (server.url, f"grpc://{server.grpc_target}"):
            code, output = loadgen(
                "run", target, *load, "--tokenizer-url", server.url, "--most-lag", "60",
                "--require", "failures<=0",
            )  # fmt: skip
            assert code == 0, output


def test_run_says_which_root_it_found() -> None:
    load = ("--input", "fixed:5", "--output", "fixed:2", "--rate", "50", "--requests", "2")
    with serving(Behaviour()) as server:
        code, output = loadgen("run", server.url, *load, "--most-lag", "60")
        assert code == 0, output
        assert f"API found at {server.url}/v1" in output
        assert len(server.log()) == 2
        code, output = loadgen("run", server.url + "/v1", *load, "--most-lag", "60")
        assert "API found" not in output
