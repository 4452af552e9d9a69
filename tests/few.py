"""The marker `few(n)`: `make test` runs n cases of a test, `make test-long` the others.

The cases are chosen by hashes of their ids, so every run and every process of a run has the same
ones. Values of parameters that no chosen case has are preferred.
"""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256

import pytest


def mark_cases_as_long(items: Sequence[pytest.Item]) -> None:
    """Add the marker `long` to cases that are not chosen, except those with `long` or `gpu`."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not (
            item.get_closest_marker("long") or item.get_closest_marker("gpu")
        ):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_function in cases.values():
        marker = of_function[0].get_closest_marker("few")
        assert marker is not None
        values = {item.nodeid: _values(item) for item in of_function}
        chosen = choose(values, *marker.args)
        for item in of_function:
            if item.nodeid not in chosen:
                item.add_marker("long")


def choose(cases: dict[str, set[tuple[str, str]]], count: int) -> set[str]:
    """Return the ids of the chosen cases.

    Args:
        cases: the values of parameters of each case, by id.
        count: number of cases to choose.
    """
    others = sorted(cases, key=lambda nodeid: sha256(nodeid.encode()).digest())
    chosen: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while others and len(chosen) < count:
        best = max(others, key=lambda nodeid: len(cases[nodeid] - seen))  # the first of equal ones
        others.remove(best)
        chosen.add(best)
        seen |= cases[best]
    return chosen


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """Return the name and the value of each parameter of a case."""
    callspec = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()
