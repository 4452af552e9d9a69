"""Memory of a serving process: garbage collection and the allocator of the C library."""

import ctypes
import gc

_M_ARENA_MAX = -8
"""The parameter of ``mallopt`` in glibc that limits the number of arenas."""
_MAX_ARENAS = 2
_FULL_COLLECTION_EVERY = 100
"""Collections of the middle generation before a full one; Python's default is 10.

Requests in progress consist of many objects. A full collection stops a gateway with 512 streams, or
a router with 4,096 queued calls, for 70 to 110 ms, every few seconds with the default.
"""


def limit_arenas() -> None:
    """Let the threads of this process allocate from two arenas, where the C library is glibc.

    Threads that wait for one another add arenas, up to eight for each core, and each keeps what it
    allocated at its peak. Without a limit, a worker on a busy machine took 20 % more memory.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)


def freeze_loaded() -> None:
    """Exclude all existing objects from future garbage collections, and make full ones rarer.

    Models, tokenizers and modules consist of about 300,000 objects. A full collection of them
    stops all threads, and thus all streams, for 100 ms or more. Memory that only loading needed is
    returned to the system, where the C library can do so (glibc).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _FULL_COLLECTION_EVERY)
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
