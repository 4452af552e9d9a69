"""Exclusion of loaded objects from garbage collection."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from services.common.garbage_collection import freeze_loaded

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.disable()  # collections run only when a test starts them
    yield
    gc.unfreeze()
    gc.enable()


class Loaded:
    def __init__(self) -> None:
        self.itself = self


def test_loaded_objects_are_not_collected_again() -> None:
    before = Loaded()
    freeze_loaded()
    after = Loaded()
    seen = {id(it) for it in gc.get_objects()}
    assert id(after) in seen
    assert id(before) not in seen


def test_garbage_is_collected_before_freezing() -> None:
    garbage = weakref.ref(Loaded())
    assert garbage() is not None, "a cycle needs the collector"
    freeze_loaded()
    assert garbage() is None
