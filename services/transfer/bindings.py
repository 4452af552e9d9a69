"""NIXL's bindings, with what it and UCX read from the environment."""

import os
from typing import Any

from services.transfer.errors import TransferUnavailable

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    # Without it, GPUs that see no NVLink, not even a GPU and itself, READ through TCP.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}


def load_nixl() -> Any:
    """NIXL's bindings. What it and UCX would print comes as exceptions instead.

    The bindings and not the wrapper over them: that one has no way to let the progress thread
    sleep, so that it burns a core in every idle process, and it keeps references that delay the
    agent's end.

    Raises:
        TransferUnavailable: they do not load here.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        from nixl import _bindings
    except ImportError as error:
        raise TransferUnavailable(f"NIXL does not load: {error}") from error
    return _bindings
