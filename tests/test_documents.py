"""Links between the documents of the repository, and the files that they name."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def documents() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return listed.stdout.splitlines()


@cache
def anchors(document: Path) -> set[str]:
    """Return the fragments by which headings of a document are linked, as on GitHub."""
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", code.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", documents())
def test_links_lead_to_a_file_and_a_heading(name: str) -> None:
    document = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        assert not fragment or fragment in anchors(linked), target


def test_files_in_the_glossary_exist() -> None:
    names = re.findall(r"`([a-z_]+/[\w/.]+)`", (ROOT / "GLOSSARY.md").read_text())
    assert "runtime/pages/plan.py" in names
    assert not [name for name in names if not (ROOT / name).exists()]
