"""An API server on loopback that answers the `lookup` of templates, with given objects.

It has discovery and GET, which `helm template --dry-run=server` needs, and nothing else.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

from tests.operate.chart.manifests import Manifest


@contextmanager
def api_server(objects: list[Manifest], rendered: list[Manifest]) -> Iterator[str]:
    """Serve objects; yield the URL for Helm's flag ``--kube-apiserver``.

    Args:
        rendered: manifests whose kinds the server knows.
    """
    answers = _discovery(rendered) | {_path(found): found for found in objects}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(urlsplit(self.path).path)
            missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            content = json.dumps(answer or missing).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _path(found: Manifest) -> str:
    metadata = found["metadata"]
    folder = f"{_root(found['apiVersion'])}/namespaces/{metadata['namespace']}"
    return f"{folder}/{_plural(found['kind'])}/{metadata['name']}"


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _plural(kind: str) -> str:
    name = kind.lower()
    return f"{name.removesuffix('y')}ies" if name.endswith("y") else f"{name}s"


def _discovery(rendered: list[Manifest]) -> dict[str, Manifest]:
    kinds: dict[str, set[str]] = {}
    for manifest in rendered:
        kinds.setdefault(manifest["apiVersion"], set()).add(manifest["kind"])
    lists = {
        _root(version): {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {"name": _plural(kind), "kind": kind, "namespaced": True, "verbs": ["get"]}
                for kind in sorted(found)
            ],
        }
        for version, found in kinds.items()
    }
    groups = [
        {"name": version.partition("/")[0], "versions": [served], "preferredVersion": served}
        for version in sorted(kinds)
        if "/" in version
        for served in [{"groupVersion": version, "version": version.partition("/")[2]}]
    ]
    return lists | {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": groups},
    }
