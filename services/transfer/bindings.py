"""Import of NIXL's bindings, and the environment that NIXL and UCX read."""

import os
from importlib import import_module
from typing import Any

import torch

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
    reasons = []
    for package in _packages(torch.version.cuda):
        try:
            return import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(f"{package}: {error}")
    raise TransferUnavailable(
        f"cannot import NIXL, which pip installs as nixl-cu13 or nixl-cu12: {'; '.join(reasons)}"
    )


def _packages(cuda: str | None) -> list[str]:
    """Return NIXL's packages for a version of CUDA, or all of them for torch without CUDA.

    The package ``nixl`` would install them all, with 58 MB each, and select one.
    """
    if cuda is not None:
        return [f"nixl_cu{cuda.partition('.')[0]}"]
    return ["nixl_cu13", "nixl_cu12"]
