"""instructor."""

import pytest

from tests.clients.client import Client
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.more_clients, pytest.mark.timeout(2400)]

INSTRUCTOR = Client("instructor", "with_instructor")


def test_output_follows_a_schema(running: Running) -> None:
    assert INSTRUCTOR.call(running, "json_schema").items() >= {"name": "Anna", "age": 7}.items()


def test_output_is_a_forced_call_by_default(running: Running) -> None:
    assert INSTRUCTOR.call(running, "tools")["kind"] in ("adult", "child")
