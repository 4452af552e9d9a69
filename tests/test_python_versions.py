"""The supported versions of Python are the same everywhere they are named."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUPPORTED = ("3.11", "3.12", "3.13", "3.14")


def test_package_admits_the_supported_versions_only() -> None:
    requires = SpecifierSet(PROJECT["requires-python"])
    tried = ("3.10", *SUPPORTED, "3.15")
    assert tuple(version for version in tried if version in requires) == SUPPORTED
    named = [re.search(r"Python :: (3\.\d+)$", one) for one in PROJECT["classifiers"]]
    assert tuple(found[1] for found in named if found) == SUPPORTED


def test_readme_names_the_supported_versions() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"Python {SUPPORTED[0]} to {SUPPORTED[-1]}" in readme
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (3\.\d+) \|", contributing, re.MULTILINE)
    assert tuple(rows) == SUPPORTED


@pytest.mark.parametrize("version", ["3.10", *SUPPORTED, "3.15"])
def test_make_refuses_unsupported_interpreters(version: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    major, minor = version.split(".")
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || exit 9\n'
        f'exec {sys.executable} -c "import sys; sys.version_info = ({major}, {minor}, 0); $2"\n'
    )
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/bin/pip"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    refused = f"Python {SUPPORTED[0]} to {SUPPORTED[-1]} is needed" in result.stdout
    assert refused == (version not in SUPPORTED), result
