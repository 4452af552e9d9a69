"""A model hub on loopback that serves the files of one folder as one repository."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit


@contextmanager
def model_hub(folder: Path, repository: str, commit: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder; yield the URL, and the list of the files that were downloaded so far.

    Args:
        repository: name such as ``owner/name``.
        commit: the only revision.
    """
    files = sorted(path.name for path in folder.iterdir())
    downloaded: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = urlsplit(self.path).path
            prefix = f"/{repository}/resolve/{commit}/"
            if path == f"/api/models/{repository}/revision/{commit}":
                siblings = [{"rfilename": name} for name in files]
                found = {"id": repository, "sha": commit, "siblings": siblings}
                self.send(json.dumps(found).encode(), body, "application/json")
            elif path.startswith(f"/api/models/{repository}/tree/{commit}"):
                self.send(json.dumps(_tree(folder)).encode(), body, "application/json")
            elif path.startswith(prefix) and path.removeprefix(prefix) in files:
                name = path.removeprefix(prefix)
                if body:
                    downloaded.append(name)
                self.send((folder / name).read_bytes(), body, "application/octet-stream")
            else:
                self.send_error(404)

        def send(self, content: bytes, body: bool, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloaded
    finally:
        server.shutdown()
        server.server_close()


def _tree(folder: Path) -> list[dict[str, object]]:
    """Return the files of a folder as the hub lists them."""
    return [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0"}
        for path in sorted(folder.iterdir())
    ]
