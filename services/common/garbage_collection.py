"""Garbage collection in a serving process."""

import ctypes
import gc


def freeze_loaded() -> None:
    """Exclude all existing objects from future garbage collections.

    Models, tokenizers and modules consist of about 300,000 objects. A full collection of them
    stops all threads, and thus all streams, for 100 ms or more. Memory that only loading needed is
    returned to the system, where the C library can do so (glibc).
    """
    gc.collect()
    gc.freeze()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
