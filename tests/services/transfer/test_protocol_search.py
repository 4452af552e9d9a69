"""The transfer's protocol holds in every interleaving of small cases; see `protocol/README.md`."""

import pytest

from tests.services.transfer.protocol.bugs import BUGS, Bug
from tests.services.transfer.protocol.cached_bugs import CACHED_BUGS
from tests.services.transfer.protocol.cases import CASES, SMALL, Case
from tests.services.transfer.protocol.search import search

_LARGE_STATES = 8_000


@pytest.mark.few(3)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_no_state_of_a_small_case_violates_the_protocol(case: Case) -> None:
    result = search(case.bounds, case.max_states)
    assert result.violation is None, str(result)
    assert result.complete
    assert result.ends


@pytest.mark.few(5)
@pytest.mark.parametrize("bug", [*BUGS, *CACHED_BUGS], ids=lambda bug: bug.name)
def test_search_finds_a_bug_that_is_put_in(bug: Bug) -> None:
    with bug.present():
        result = search(bug.bounds)
    assert result.violation is not None, str(result)
    assert bug.violation in result.violation, str(result)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_first_states_of_a_large_case_do_not_violate_the_protocol(case: Case) -> None:
    """``python -m tests.services.transfer.protocol`` searches more than a million states."""
    result = search(case.bounds, _LARGE_STATES)
    assert result.violation is None, str(result)
    assert result.states >= _LARGE_STATES
