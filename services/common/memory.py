"""Memory of a serving process: garbage collection and the allocator of the C library."""

import ctypes
import gc

_M_ARENA_MAX = -8
"""The parameter of ``mallopt`` in glibc that limits the number of arenas."""
_MAX_ARENAS = 2


def limit_arenas() -> None:
    """Let the threads of this process allocate from two arenas, where the C library is glibc.

    Threads that wait for one another add arenas, up to eight for each core, and each keeps what it
    allocated at its peak. Without a limit, a worker on a busy machine took 20 % more memory.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)


def freeze_loaded(*, full_collection_every: int = 10) -> None:
    """Exclude all existing objects from future garbage collections.

    Models, tokenizers and modules consist of about 300,000 objects. A full collection of them
    stops all threads, and thus all streams, for 100 ms or more. Memory that only loading needed is
    returned to the system, where the C library can do so (glibc).

    Args:
        full_collection_every: collections of the middle generation until all later objects are
            collected; 10 is Python's default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], full_collection_every)
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
