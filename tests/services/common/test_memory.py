"""Exclusion of loaded objects from garbage collection, and arenas of the allocator."""

import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from services.common.memory import freeze_loaded

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.disable()  # collections run only when a test starts them
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.enable()


class Loaded:
    def __init__(self) -> None:
        self.itself = self


def test_many_live_objects_start_no_full_collection() -> None:
    """Each full collection of the objects of requests in progress would pause all streams."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    freeze_loaded()
    gc.callbacks.append(note)
    gc.enable()
    live = [[number] for number in range(300_000)]
    gc.callbacks.remove(note)
    assert len(live) == 300_000
    assert 1 in generations
    assert 2 not in generations


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


ARENAS = """
import ctypes, sys, tempfile, threading
from services.common.memory import limit_arenas

if sys.argv[1] == "limited":
    limit_arenas()
c = ctypes.CDLL(None)
c.malloc.restype = c.fopen.restype = ctypes.c_void_p
c.malloc_info.argtypes = ctypes.c_int, ctypes.c_void_p
c.fclose.argtypes = (ctypes.c_void_p,)
together = threading.Barrier(6)

def allocate():
    together.wait()
    c.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    out = c.fopen(file.name.encode(), b"w")
    c.malloc_info(0, out)
    c.fclose(out)
    print(file.read().count(b"<heap "))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize(("limit", "expected"), [("limited", {2}), ("default", {6, 7})])
def test_threads_share_two_arenas(limit: str, expected: set[int]) -> None:
    command = [sys.executable, "-c", ARENAS, limit]
    arenas = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(arenas) in expected
