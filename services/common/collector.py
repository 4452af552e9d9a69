"""Python's garbage collector in a process that serves."""

import gc


def freeze_loaded() -> None:
    """What has been loaded stays, and no collection goes through it again.

    Models, tokenizers and modules are some 300,000 objects: a full collection that visits them
    stops all threads, and with them every stream, for 100 ms and more.
    """
    gc.collect()
    gc.freeze()
