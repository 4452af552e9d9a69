"""Browsers, to see what becomes of a page: a machine's Chromium, and the one inside of `kaleido`.

kaleido 0.2.1 is a wheel with a headless Chromium of 2021 that needs no root, no library of the
system and no network. It runs a script for each line that it reads, and prints what becomes of it;
that script is meant to be plotly.js, and here it is one that looks at pages.
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


class NotSeen(Exception):
    """The browser said something else than what it was asked."""


@dataclass(frozen=True)
class View:
    """A width in CSS pixels at which a page is looked at, on a screen or on paper."""

    width: int
    print: bool = False


def chromium() -> str | None:
    """Where the machine's is, if it has one; $CHROMIUM goes first."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in _CHROMIUMS if (path := shutil.which(name))), None)


def kaleido() -> str | None:
    """The folder of the executable of kaleido, if that is installed."""
    found = importlib.util.find_spec("kaleido")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "executable"
    return str(path) if (path / "bin" / "kaleido").exists() else None


def look_by_chromium(
    path: str, page: str, views: Sequence[View], folder: Path
) -> list[dict[str, Any]]:
    """What `look.js` sees of a page, at each view. ``folder``: for the browser's files.

    Raises:
        NotSeen: nothing was, or the page made the browser complain.
    """
    alone = folder / "look.html"
    given = (json.dumps(one).replace("<", "\\u003c") for one in (page, _as_json(views)))
    alone.write_text(_ALONE % (_LOOK, *given))
    command = [
        path, "--headless=new", *_FLAGS, "--enable-logging=stderr", "--virtual-time-budget=20000",
        f"--user-data-dir={folder / 'profile'}", "--dump-dom", alone.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    seen = re.search(r'<pre id="seen">([^<]+)</pre>', done.stdout)
    if said or seen is None:
        raise NotSeen("\n".join(said) or done.stderr[-2000:])
    return list(json.loads(unquote(seen[1])))


def look_by_kaleido(
    path: str, page: str, views: Sequence[View], folder: Path
) -> list[dict[str, Any]]:
    """The same, without what the browser complains of: this one does not tell."""
    script = folder / "look.js"
    script.write_text(_LOOK + _AS_PLOTLY)
    asked = {"data": [{"page": page, "views": _as_json(views)}]}
    own = {"LD_LIBRARY_PATH": "lib", "FONTCONFIG_PATH": "etc/fonts", "XDG_DATA_HOME": "xdg"}
    command = ["bin/kaleido", "plotly", f"--plotlyjs={script}", *_FLAGS, "--single-process"]
    done = subprocess.run(
        command, input=json.dumps({"data": asked, "format": "svg"}) + "\n", cwd=path,
        env=os.environ | {name: str(Path(path, where)) for name, where in own.items()},
        capture_output=True, text=True, timeout=_TIMEOUT_S,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers or not answers[-1].get("result"):
        raise NotSeen(done.stdout[-500:] + done.stderr[-2000:])
    return list(json.loads(answers[-1]["result"]))


def _as_json(views: Sequence[View]) -> list[dict[str, Any]]:
    return [vars(view) for view in views]
