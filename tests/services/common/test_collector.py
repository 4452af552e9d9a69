"""What a process has loaded is out of the garbage collector's way."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from services.common.collector import freeze_loaded


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.disable()  # it runs when a test says so, and at no other time
    yield
    gc.unfreeze()
    gc.enable()


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


def test_garbage_is_collected_first_and_not_kept_for_ever() -> None:
    garbage = weakref.ref(Loaded())
    assert garbage() is not None, "a cycle waits for the collector"
    freeze_loaded()
    assert garbage() is None
