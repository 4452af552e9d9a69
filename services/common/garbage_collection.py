"""Garbage collection in a serving process."""

import gc


def freeze_loaded() -> None:
    """Exclude all existing objects from future garbage collections.

    Models, tokenizers and modules consist of about 300,000 objects. A full collection of them
    stops all threads, and thus all streams, for 100 ms or more.
    """
    gc.collect()
    gc.freeze()
