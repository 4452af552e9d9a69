"""Fixtures of the engine tests."""

import pytest

from runtime.models.model import Model
from tests.runtime.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()
