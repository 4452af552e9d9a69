"""Fixtures of the replay tests."""

from dataclasses import replace

import pytest

from runtime.models.model import Model
from tests.runtime.tiny import CONFIG, tiny_model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(config=replace(CONFIG, num_layers=1, vocab_size=1300))
