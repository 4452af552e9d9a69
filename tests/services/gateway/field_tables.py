"""Tables of fields in the documentation, as they follow from the declarations."""

from collections.abc import Mapping
from pathlib import Path

from services.gateway.http.other_fields import OtherFields

DOCUMENTS = Path(__file__).parents[3] / "services/gateway"


def expected_rows(places: Mapping[str, OtherFields]) -> list[str]:
    """Return the rows of a table of ignored values, for fields by the prefix of their paths."""
    grouped: dict[str, list[str]] = {}
    for place, others in places.items():
        for name, other in others.items():
            grouped.setdefault(other.accepted, []).append(f"`{place}{name}`")
    return [f"| {accepted} | {', '.join(fields)} |" for accepted, fields in grouped.items()]


def table_rows(document: str, head: str) -> list[str]:
    """Return the rows of the table in a document of the gateway that has this head."""
    text = (DOCUMENTS / document).read_text(encoding="utf-8")
    return text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
