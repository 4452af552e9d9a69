"""Loading of NIXL's bindings, with the environment variables that it and UCX read."""

import os
from typing import Any

from services.transfer.errors import TransferUnavailable

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    # Without it UCX uses TCP between GPUs that have no NVLink, even within one GPU.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}


def load_nixl() -> Any:
    """Return NIXL's bindings; logging is off, since errors arrive as exceptions.

    The bindings are used without NIXL's Python wrapper. The wrapper cannot let the progress thread
    sleep, so every idle process uses a core, and it keeps references that delay the agent's end.

    Raises:
        TransferUnavailable: the bindings do not load on this machine.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        from nixl import _bindings
    except ImportError as error:
        raise TransferUnavailable(f"NIXL does not load: {error}") from error
    return _bindings
