"""Report made of sections with tables and plots, for programs that measure with this package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.report.environment import lines
from loadgen.report.page import render
from loadgen.report.plot import Plot


@dataclass(frozen=True)
class Table:
    """Table of formatted cells, in groups of rows that are compared with one another.

    Attributes:
        columns: title and unit of each column; the first column has the names of the rows.
        groups: rows by title of their group. A row has as many cells as there are columns.
    """

    columns: Sequence[tuple[str, str]]
    groups: Mapping[str, Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Section:
    """Part of a report with its own heading.

    Attributes:
        note: paragraph below the heading.
    """

    title: str
    note: str = ""
    table: Table | None = None
    plots: Sequence[Plot] = ()


def document_page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    environments: Mapping[str, dict[str, Any]],
) -> str:
    """Return an HTML report.

    Args:
        environments: manifests by title, shown at the end.
    """
    return render(
        "document.html.j2",
        title=title,
        subtitle=subtitle,
        sections=sections,
        environments={name: lines(manifest) for name, manifest in environments.items()},
    )
