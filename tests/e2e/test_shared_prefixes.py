"""Deployments that keep prefixes answer chats with the tokens of those that do not."""

import pytest

from tests.programs.shared_prefixes import TURNS, run

pytestmark = pytest.mark.e2e

CHATS = 6
"""`python -m tests.programs.shared_prefixes` compares more."""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kv_format", ["dense", "int4"])
def test_chats_have_the_tokens_of_a_deployment_without_a_cache(kv_format: str) -> None:
    found = run(CHATS, ("--kv-format", kv_format))
    assert not found.comparison.different
    assert found.comparison.equal >= CHATS * TURNS - 2, found.comparison.close
    assert found.cached > 0.3 * found.prompt
    assert found.saved_bytes > 0
    assert (found.history > 0) is (kv_format == "dense")
