"""The verdict of `make audit` on reports of pip-audit."""

import json
from importlib.metadata import version
from typing import Any

from tests.audit import installed, verdict

SAFE = {"name": "attrs", "version": "26.1.0", "vulns": []}
FLAW = {"id": "PYSEC-1", "aliases": ["CVE-2026-1"], "fix_versions": ["2.1"], "description": "…"}
UNSAFE = {"name": "quart", "version": "2.0", "vulns": [FLAW]}
UNKNOWN = {"name": "nixl", "skip_reason": "Dependency not found on PyPI"}


def report(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


def test_audit_fails_with_a_known_vulnerability() -> None:
    code, text = verdict(report(SAFE, UNKNOWN, UNSAFE), "")
    assert code == 1
    assert text == "audit: quart 2.0: PYSEC-1, CVE-2026-1, fixed in 2.1"


def test_audit_passes_and_names_packages_without_advisories() -> None:
    code, text = verdict(report(SAFE, UNKNOWN), "")
    assert code == 0
    assert text == "audit: no known vulnerability in 1 packages; no advisories for nixl"


def test_audit_says_so_where_advisories_cannot_be_fetched() -> None:
    """A mirror answers 404 for the advisories of each package, or no service answers at all."""
    for code, text in (
        verdict(report(UNKNOWN, UNKNOWN), "No known vulnerabilities found"),
        verdict("", "Traceback …\nConnectionError: no route"),
        verdict("", ""),
    ):
        assert code == 0
        assert text.startswith("audit: skipped, advisories could not be fetched")


def test_audit_fails_without_pip_audit() -> None:
    code, text = verdict("", "/bin/python: No module named pip_audit\n")
    assert (code, text) == (1, "audit: /bin/python: No module named pip_audit")


def test_audit_covers_installed_packages_under_their_public_versions() -> None:
    requirements = installed()
    assert f"grpcio=={version('grpcio')}" in requirements
    assert not [line for line in requirements if "+" in line or line.startswith("headrace==")]
