"""Deployments that keep prefixes answer chats with the tokens of those that do not."""

import pytest

from tests.programs import chat_faults
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


@pytest.mark.long
@pytest.mark.timeout(900)
def test_chats_have_these_tokens_while_workers_are_killed() -> None:
    """Turns and forks with hang-ups, evicted pages, and a killed worker of each role per turn.

    `python -m tests.programs.chat_faults` compares more chats, and other formats.
    """
    workers = ("--prefill", "2", "--decode", "2", "--kills", "--kv-tokens", "1024")
    arguments = ("--chats", str(CHATS), "--kv-format", "int4", *workers)
    found = chat_faults.run(chat_faults.parse(arguments))
    assert not found.different
    assert len(found.close) < 0.01 * found.equal, found.close
    assert found.cached > 0.3 * found.prompt
    assert found.cancelled
