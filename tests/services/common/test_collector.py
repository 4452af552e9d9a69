"""What a process has loaded is out of the garbage collector's way."""

import gc
from collections.abc import Iterator

import pytest

from services.common.collector import freeze_loaded


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


class Loaded:
    def __init__(self) -> None:
        self.itself = self


def test_collections_no_longer_go_through_what_was_loaded() -> None:
    before = Loaded()
    freeze_loaded()
    after = Loaded()
    seen = {id(it) for it in gc.get_objects()}
    assert id(after) in seen
    assert id(before) not in seen


def test_garbage_is_collected_and_not_kept_for_ever() -> None:
    Loaded()
    freeze_loaded()
    gc.unfreeze()
    assert not any(isinstance(it, Loaded) for it in gc.get_objects())
