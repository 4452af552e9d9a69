"""Import of NIXL's bindings, and the environment that NIXL and UCX read."""

import os
from typing import Any

from services.transfer.errors import TransferUnavailable
from services.transfer.network import TransferNetwork, restrict_ucx

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    # By default UCX uses TCP between GPUs without NVLink, even within one GPU.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}


def load_nixl(network: TransferNetwork) -> Any:
    """Return NIXL's bindings, after setting the environment variables of NIXL and UCX.

    NIXL and UCX are set to log fatal errors only, because NIXL reports errors as exceptions too.
    Variables that are already set keep their values.

    The bindings are used instead of NIXL's Python wrapper for two reasons. With the wrapper
    the progress thread never sleeps, so an idle process uses a whole core. The wrapper also keeps
    references that delay the destruction of the agent.

    Raises:
        TransferUnavailable: if the bindings cannot be imported.
        SettingsError: if this machine does not have the network's interface.
    """
    restrict_ucx(network)
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        from nixl import _bindings
    except ImportError as error:
        raise TransferUnavailable(
            f"cannot import NIXL, which pip installs as nixl: {error}"
        ) from error
    return _bindings
