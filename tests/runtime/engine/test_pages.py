"""Allocation of pages to sequences."""

import pytest

from runtime.engine.pages import SequencePages


@pytest.mark.parametrize(
    ("exact", "stored", "running", "suffice"),
    [
        (100, 0, 100, True),  # a format without stored pages
        (100, 0, 101, False),
        (100, 100, 100, True),
        (100, 50, 51, False),
        (50, 100, 51, False),
    ],
)
def test_a_step_needs_at_most_one_page_of_each_kind_that_the_format_has(
    exact: int, stored: int, running: int, suffice: bool
) -> None:
    assert SequencePages(exact, stored, 16).suffice_for_step(running) is suffice
