"""Run uv with the sources of packages that pip is configured to use: ``python deploy/uv.py pip …``.

uv installs packages several times faster than pip, but does not read pip's configuration.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

from pip._internal.models.index import PyPI

_SECTIONS = ("global", "install", ":env:")
"""Sections of pip's configuration that apply to installations, by increasing precedence."""
_VARIABLES = {
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
"""Variable of uv for each option of pip, and the separator of its values."""


def sources_of_pip() -> dict[str, str]:
    """Return variables with which uv uses the sources and certificates of pip."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    options: dict[tuple[str, str], str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        options[section, option] = ast.literal_eval(value)
    effective = {
        option: options[section, option].split()
        for section in _SECTIONS
        for found, option in options
        if found == section
    }
    # As with pip, the newest version of all sources counts. Of a version, uv takes the files of one
    # source only, and the index of pip has all of them. Its default index is the last one for uv.
    index = effective.get("index-url") or [PyPI.simple_url]
    *first, last = [*index, *effective.get("extra-index-url", [])]
    return {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INDEX": " ".join(first),
        "UV_DEFAULT_INDEX": last,
        "UV_SYSTEM_CERTS": "true",
        **{
            variable: separator.join(effective[option])
            for option, (variable, separator) in _VARIABLES.items()
            if option in effective
        },
    }


def main() -> None:
    """Replace this process by uv, which installs into this environment."""
    own = Path(sys.executable).with_name("uv")
    variables = {**sources_of_pip(), "VIRTUAL_ENV": sys.prefix, **os.environ}
    os.execve(own, [str(own), *sys.argv[1:]], variables)


if __name__ == "__main__":
    main()
