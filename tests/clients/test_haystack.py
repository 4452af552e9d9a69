"""Haystack."""

import pytest

from tests.clients.client import Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.more_clients, pytest.mark.timeout(2400)]

HAYSTACK = Client("haystack", "with_haystack")


def test_pipeline_finds_documents(running: Running) -> None:
    answer = HAYSTACK.call(running, "retrieval", HAYSTACK_TELEMETRY_ENABLED="False")
    assert len(answer["found"]) == 5
    assert all(name == best for name, best in answer["found"].items())
    assert answer["tokens"] > 5
