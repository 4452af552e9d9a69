"""Errors of files that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError that the block raises without one, such as a failed write.

    Raises:
        OSError: with ``path`` as its ``filename``.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
