"""`make audit`: check the installed packages against the advisories of PyPI.

Exits with 1 only for a known vulnerability. Where the advisories cannot be fetched, for example
behind a mirror that has packages alone, it says so and exits with 0. pip-audit itself either fails
there or reports "No known vulnerabilities found".
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from typing import Any

_OWN = "headrace"
_LIMIT_S = 300.0


def installed() -> list[str]:
    """Return a requirement for each installed package, without local versions such as +cpu."""
    found = {item.name: item.version.partition("+")[0] for item in distributions()}
    return sorted(f"{name}=={version}" for name, version in found.items() if name != _OWN)


def verdict(report: str, errors: str) -> tuple[int, str]:
    """Return the exit code and the text for a report of pip-audit.

    Args:
        report: JSON that it wrote to stdout; empty or invalid if it failed.
        errors: what it wrote to stderr.
    """
    try:
        packages: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (errors.strip().splitlines() or ["pip-audit has failed"])[-1]
        if "No module named pip_audit" in last:
            return 1, f"audit: {last}"
        return 0, f"audit: skipped, advisories could not be fetched: {last}"
    findings = [(package, flaw) for package in packages for flaw in package.get("vulns", ())]
    if findings:
        return 1, "\n".join(_describe(package, flaw) for package, flaw in findings)
    missing = sorted(package["name"] for package in packages if "skip_reason" in package)
    if len(missing) == len(packages):
        return 0, "audit: skipped, advisories could not be fetched for any package"
    text = f"audit: no known vulnerability in {len(packages) - len(missing)} packages"
    return 0, text + (f"; no advisories for {', '.join(missing)}" if missing else "")


def _describe(package: dict[str, Any], flaw: dict[str, Any]) -> str:
    names = ", ".join([flaw["id"], *flaw.get("aliases", ())])
    fixed = ", ".join(flaw.get("fix_versions", ())) or "no version"
    return f"audit: {package['name']} {package['version']}: {names}, fixed in {fixed}"


def main(arguments: list[str]) -> int:
    """Run pip-audit with further arguments, print the verdict and return the exit code."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write("\n".join(installed()))
        requirements.flush()
        command = [
            *(sys.executable, "-m", "pip_audit", "--requirement", requirements.name),
            *("--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"),
            *arguments,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
            code, text = verdict(done.stdout, done.stderr)
        except subprocess.TimeoutExpired:
            code, text = verdict("", f"no answer within {_LIMIT_S:.0f} s")
    print(text)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
