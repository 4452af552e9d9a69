"""Rendering of pages in browsers: the machine's Chromium, and the one in the `kaleido` package.

The kaleido 0.2.1 wheel contains a headless Chromium of 2021. It needs no system libraries, no root
rights and no network. kaleido runs a script for each input line and prints the result. The script
is normally plotly.js; here it is `look.js`, which inspects pages.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_LOOK = Path(__file__).with_name("look.js").read_text()
_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_TIMEOUT_S = 120
_AS_PLOTLY = """
window.Plotly = {version: "2.0.0", toImage: ({data}) => look(data[0].page, data[0].views)};
"""
_ALONE = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><body>
<pre id="seen"></pre><script>
%s
look(%s, %s).then((seen) => { document.getElementById("seen").textContent = encodeURI(seen); });
</script>"""


class RenderError(Exception):
    """The browser returned no result, or errors of the page were logged."""


@dataclass(frozen=True)
class View:
    """Viewport width in CSS pixels, on screen or for print."""

    width: int
    print: bool = False


def chromium() -> str | None:
    """Return the path of Chromium: $CHROMIUM, else one on PATH, or None."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in _CHROMIUMS if (path := shutil.which(name))), None)


def kaleido() -> str | None:
    """Return the folder of kaleido's executable, or None if it is not installed."""
    found = importlib.util.find_spec("kaleido")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "executable"
    return str(path) if (path / "bin" / "kaleido").exists() else None


def look_by_chromium(
    path: str, page: str, views: Sequence[View], folder: Path
) -> list[dict[str, Any]]:
    """Return the results of `look.js` for a page, one per view.

    Args:
        folder: folder for the browser's temporary files.

    Raises:
        RenderError: if there is no result, or the browser logged errors.
    """
    alone = folder / "look.html"
    given = (json.dumps(one).replace("<", "\\u003c") for one in (page, _as_json(views)))
    alone.write_text(_ALONE % (_LOOK, *given))
    command = [
        path, "--headless=new", *_FLAGS, "--enable-logging=stderr", "--virtual-time-budget=20000",
        f"--user-data-dir={folder / 'profile'}", "--dump-dom", alone.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    seen = re.search(r'<pre id="seen">([^<]+)</pre>', done.stdout)
    if errors or seen is None:
        raise RenderError("\n".join(errors) or done.stderr[-2000:])
    return list(json.loads(unquote(seen[1])))


def look_by_kaleido(
    path: str, page: str, views: Sequence[View], folder: Path
) -> list[dict[str, Any]]:
    """Return the results of `look.js` for a page, as `look_by_chromium` does.

    Errors of the page are not detected, because kaleido does not report them.
    """
    script = folder / "look.js"
    script.write_text(_LOOK + _AS_PLOTLY)
    request = {"data": [{"page": page, "views": _as_json(views)}]}
    own = {"LD_LIBRARY_PATH": "lib", "FONTCONFIG_PATH": "etc/fonts", "XDG_DATA_HOME": "xdg"}
    command = ["bin/kaleido", "plotly", f"--plotlyjs={script}", *_FLAGS, "--single-process"]
    done = subprocess.run(
        command, input=json.dumps({"data": request, "format": "svg"}) + "\n", cwd=path,
        env=os.environ | {name: str(Path(path, where)) for name, where in own.items()},
        capture_output=True, text=True, timeout=_TIMEOUT_S,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers or not answers[-1].get("result"):
        raise RenderError(done.stdout[-500:] + done.stderr[-2000:])
    return list(json.loads(answers[-1]["result"]))


def _as_json(views: Sequence[View]) -> list[dict[str, Any]]:
    return [vars(view) for view in views]
