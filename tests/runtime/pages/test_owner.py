"""Only `runtime.pages` computes pages; only KV formats and what runs them name kinds of pages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ARITHMETIC = re.compile(r"//\s*\(?[\w.* ]*\bpage(_size)?\b", re.IGNORECASE)
"""Divisions by the page size."""
KINDS = re.compile(
    r"full.?precision|\b(has|num)_stored\b|\bstored_(free|total|table|pages|bytes)\b"
    r"|\b(exact|stored|compressed)_?(pages|planes)\b|promised_stored"
    r"|\b(exact|stored|compressed) (KV )?(page|plane)s?\b",
    re.IGNORECASE,
)
"""Names of the groups of compressed formats, past and present."""
TENSOR_CODE = {
    "runtime/attention",
    "runtime/kv",
    "runtime/megakernel",
    "runtime/offline/quality",
}
"""Folders whose code computes the position of a token in a tensor of pages."""
FORMATS = {
    "runtime/offline/bench",
    "runtime/kv",
    "runtime/megakernel",
    "runtime/offline/quality",
    "runtime/steps",
}
"""KV formats, what encodes their pages in a step, and programs that measure them."""


def sources(*exempt: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of each source file outside of the exempt files and folders."""
    for folder in ("runtime", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not any(name == each or name.startswith(f"{each}/") for each in exempt):
                yield name, path.read_text()


@pytest.mark.parametrize(
    ("pattern", "exempt"),
    [(ARITHMETIC, TENSOR_CODE), (KINDS, FORMATS)],
    ids=["arithmetic", "kinds of pages"],
)
def test_only_the_page_plan_knows(pattern: re.Pattern[str], exempt: set[str]) -> None:
    found = [
        f"{name}: {match.group()}"
        for name, text in sources("runtime/pages", *exempt)
        for match in pattern.finditer(text)
    ]
    assert not found
