"""Tracked text: results of `str`, and no character of the client counts as the template's."""

from collections.abc import Callable
from string import Formatter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.tracked_text import TrackedText, format_fields, join, mask_of

# The template writes upper case, the client lower case. Both write spaces and punctuation.
template_texts = st.text("AB \n,%", max_size=8).map(TrackedText.from_template)
client_texts = st.text("ab \n,%", max_size=8)
texts = st.lists(template_texts | client_texts, max_size=4).map(join)

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "add plain": lambda a, b: a + str.__str__(b),
    "right add": lambda a, b: str.__str__(b) + a,
    "join": lambda a, b: a.join([b, a, b]),
    "iteration": lambda a, b: list(a) + list(b),
    "multiplication": lambda a, _: a * 3,
    "right multiplication": lambda a, _: 2 * a,
    "index": lambda a, _: a[0] if a else a,
    "slice": lambda a, b: a[len(b) // 2 :],
    "reversal": lambda a, _: a[::-1],
    "replace": lambda a, b: a.replace(b[:1] or "A", b),
    "replace once": lambda a, b: a.replace(",", b, 1),
    "replace nothing": lambda a, b: a.replace("", b),
    "split": lambda a, _: a.split(),
    "split once": lambda a, _: a.split(None, 1),
    "split at": lambda a, b: a.split(b[:1] or "A"),
    "split right": lambda a, _: a.rsplit(",", 1),
    "split right once": lambda a, _: a.rsplit(None, 1),
    "lines": lambda a, _: a.splitlines(),
    "lines with ends": lambda a, _: a.splitlines(True),
    "partition": lambda a, b: a.partition(b[:1] or "A"),
    "right partition": lambda a, b: a.rpartition(b[:1] or "A"),
    "strip": lambda a, _: a.strip(),
    "strip characters": lambda a, b: a.strip(b),
    "left strip": lambda a, _: a.lstrip("\n"),
    "right strip": lambda a, _: a.rstrip(" A"),
    "prefix": lambda a, b: a.removeprefix(b[:1]),
    "suffix": lambda a, b: a.removesuffix(b[-1:]),
    "upper": lambda a, _: a.upper(),
    "title": lambda a, _: a.title(),
    "str": lambda a, _: str(a),
    "comparison": lambda a, b: [a == b, a < b, b in a, a.startswith(b), a.find(b), len(a)],
    "hash": lambda a, b: {a: 1}.get(b),
    "centre": lambda a, _: a.center(20),
    "repr": lambda a, b: repr([a, b]),
}


def strings(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [text for text in values if isinstance(text, str)]


@given(texts, texts)
def test_results_are_those_of_str(a: str, b: str) -> None:
    for name, operation in OPERATIONS.items():
        result = operation(a, b)
        assert result == operation(str.__str__(a), str.__str__(b)), name
        for text in strings(result):
            assert len(mask_of(text)) == len(text)
            if name not in ("upper", "title"):
                own = [c for c, mark in zip(text, mask_of(text), strict=True) if mark == "1"]
                assert not set(own) & set("ab"), name


@given(texts)
def test_untouched_characters_keep_their_origin(a: str) -> None:
    for result in (a[:], a + "", "" + a, a.strip("x"), a.replace("x", "y"), join([a])):
        assert (result, mask_of(result)) == (a, mask_of(a))


@pytest.mark.parametrize(
    ("form", "values", "mask"),
    [
        ("<%s>", ("x",), "101"),
        ("<%s>", "x", "101"),
        ("%d%% %s", (5, "y"), "0010"),
        ("%(a)s!", {"a": "x"}, "01"),
        ("%-3s|", ("x",), "0001"),
    ],
)
def test_percent_formatting_keeps_the_text_of_the_template(
    form: str, values: Any, mask: str
) -> None:
    result = TrackedText.from_template(form) % values
    assert result == form % values
    assert mask_of(result) == mask


@pytest.mark.parametrize(
    ("form", "args", "named", "mask"),
    [
        ("<{}>{}", ("x", "y"), {}, "1010"),
        ("<{0}{a}>{{}}", ("x",), {"a": "y"}, "100111"),
        ("{:>3}|{!r}", ("x", "y"), {}, "0001000"),
    ],
)
def test_format_keeps_the_text_of_the_template(form: str, args: Any, named: Any, mask: str) -> None:
    result = format_fields(Formatter(), TrackedText.from_template(form), args, named)
    assert result == form.format(*args, **named)
    assert mask_of(result) == mask


def test_text_of_the_client_is_not_a_format_of_the_template() -> None:
    form = TrackedText.from_template("<") + "%s>"
    assert mask_of(form % TrackedText.from_template("x")) == "000"
    assert mask_of(format_fields(Formatter(), "{}", [TrackedText.from_template("x")], {})) == "0"
