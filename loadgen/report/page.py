"""Rendering of templates. All content is escaped, except generated drawings."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadgen.number import counted, exact, ms, percent, plain, size

_STYLE = "style.css"


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("loadgen.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = (counted, exact, ms, percent, plain, size)
    made.filters |= {form.__name__: form for form in formats}
    return made


def render(template: str, **content: Any) -> str:
    """Render a page with its style sheet."""
    environment = _environment()
    style = Markup(environment.get_template(_STYLE).render())
    return environment.get_template(template).render(style=style, **content)


def write_page(path: Path, page: str) -> None:
    """Write a page, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
