"""Network devices and TCP ports of KV transfers, as environment variables of UCX.

UCX listens on every device that it may use. Any process that can connect may read and write
registered memory, so the worker's settings restrict the devices.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import SettingsError

LOOPBACK_DEVICE = "lo"
_RDMA_FOLDER = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class TransferNetwork:
    """Restrictions on the network that a transfer agent uses.

    Attributes:
        loopback: whether all peers are on this machine.
        interface: name of the only TCP interface to use, or None for UCX's choice.
        ports: range of TCP ports to listen on, ``low-high``, or None for ephemeral ports.
    """

    loopback: bool = False
    interface: str | None = None
    ports: str | None = None


def ucx_environment(
    network: TransferNetwork, rdma_devices: Sequence[str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the UCX variables that restrict transfers to a network.

    Loopback transfers use the loopback device. Other transfers use the named TCP interface and all
    RDMA devices. Without a named interface UCX chooses among all devices. Shared memory and
    CUDA IPC are not network devices, so these variables do not affect them.

    Args:
        network: the restrictions.
        rdma_devices: UCX names of this machine's RDMA ports, such as ``mlx5_0:1``.
        given: environment of the process; its variables take precedence.
    """
    environment = {}
    if network.interface is not None:
        environment["UCX_NET_DEVICES"] = ",".join((*rdma_devices, network.interface))
    elif network.loopback:
        environment["UCX_NET_DEVICES"] = LOOPBACK_DEVICE
    if network.ports is not None:
        environment["UCX_TCP_PORT_RANGE"] = network.ports
    return {name: value for name, value in environment.items() if name not in given}


def restrict_ucx(network: TransferNetwork) -> None:
    """Set the UCX variables of this process. UCX reads them when it starts.

    Raises:
        SettingsError: if this machine does not have the named interface.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    if network.interface is not None and network.interface not in interfaces:
        raise SettingsError(
            f"transfer_interface {network.interface} does not exist; this machine has "
            f"{', '.join(interfaces)}"
        )
    os.environ.update(ucx_environment(network, rdma_devices(), os.environ))


def rdma_devices(folder: Path = _RDMA_FOLDER) -> list[str]:
    """Return the UCX names of this machine's RDMA ports, from the kernel's device list."""
    return [f"{port.parent.parent.name}:{port.name}" for port in sorted(folder.glob("*/ports/*"))]
