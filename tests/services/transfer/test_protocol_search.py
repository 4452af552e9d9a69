"""The transfer's protocol holds in every interleaving of small cases; see `protocol/README.md`."""

import pytest

from tests.services.transfer.protocol.bugs import BUGS, Bug
from tests.services.transfer.protocol.cases import CASES, SMALL, Case
from tests.services.transfer.protocol.search import search


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_no_state_of_a_small_case_violates_the_protocol(case: Case) -> None:
    result = search(case.bounds, case.max_states)
    assert result.violation is None, str(result)
    assert result.complete
    assert result.ends


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_search_finds_a_bug_that_is_put_in(bug: Bug) -> None:
    with bug.present():
        result = search(bug.bounds)
    assert result.violation is not None, str(result)
    assert bug.violation in result.violation, str(result)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_state_of_a_million_violates_the_protocol() -> None:
    states = 0
    for case in CASES:
        result = search(case.bounds, case.max_states)
        assert result.violation is None, str(result)
        states += result.states
    assert states >= 1_000_000
