"""Disaggregated output equals colocated output on 12 real prompts, dense and factorized."""

import pytest

from tests.harness.random_model import RandomModel
from tests.programs.equality import Case, Row, make_cases, run

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(12, longest=700, max_tokens=24)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_dense_tokens_and_pages_equal_those_of_one_worker(cases: list[Case]) -> None:
    """`make equality` compares 50 prompts, with SplitZip as well."""
    for row in run(cases, (), label="dense", codecs=["raw"]):
        _check(row, len(cases))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_factorized_tokens_and_pages_equal_those_of_one_worker(cases: list[Case]) -> None:
    """The model has random factor pairs. `make equality` compares a factorized SmolLM2."""
    model = RandomModel("smollm2-135m", keep=0.8).ensure()
    flags = ("--model", str(model))
    for row in run(cases, flags, label="keep 0.8", codecs=["splitzip"]):
        _check(row, len(cases))


def _check(row: Row, count: int) -> None:
    found = row.comparison
    assert not found.different, f"{row.name}: {found.different}"
    assert found.equal + len(found.close) == count
    assert len(found.close) <= 2, f"{row.name}: too many near-ties: {found.close}"
    assert row.digests_compared == count, f"{row.name}: not every prompt's pages were compared"
    assert row.digests_equal == row.digests_compared, f"{row.name}: pages differ after the transfer"
