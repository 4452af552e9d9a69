"""Network devices and TCP ports of KV transfers, as environment variables of UCX.

UCX listens on every device that it may use. Any process that can connect may read and write
registered memory, so the worker's settings restrict the devices.
"""

import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from services.common.errors import SettingsError

log = structlog.get_logger()

Listener = tuple[str, int]
"""Address and TCP port of a listening socket."""

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


@contextmanager
def checked_listeners() -> Iterator[None]:
    """Check the listeners that are opened in the block; see `check_listeners`."""
    before = _listeners()
    yield
    check_listeners(_listeners() - before, os.environ)


def _listeners() -> set[Listener]:
    """Return the TCP sockets on which this process listens; empty if they cannot be listed."""
    try:
        connections = psutil.Process().net_connections("tcp")
    except psutil.Error as error:
        log.warning("cannot list listening sockets", error=str(error))
        return set()
    return {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}


def check_listeners(opened: Iterable[Listener], environment: Mapping[str, str]) -> None:
    """Check that UCX listens only where its variables allow.

    It warns if ``UCX_NET_DEVICES`` does not name the devices, since whoever can reach a listener
    can read and write registered memory.

    Args:
        opened: listeners that UCX has opened.
        environment: environment of the process.

    Raises:
        SettingsError: a listener has an address of another device, or a port outside the range.
    """
    shown = ", ".join(f"{address} port {port}" for address, port in sorted(opened))
    allowed = _addresses_of(environment.get("UCX_NET_DEVICES", "all"))
    low, _, high = environment.get("UCX_TCP_PORT_RANGE", "0").partition("-")
    for address, port in opened:
        if allowed is not None and ipaddress.ip_address(address) not in allowed:
            raise SettingsError(
                f"KV transfers listen on {shown}, but UCX_NET_DEVICES is "
                f"{environment['UCX_NET_DEVICES']}"
            )
        if low.isdecimal() and int(low) and not int(low) <= port <= int(high or low):
            raise SettingsError(f"KV transfers listen on {shown}, but their ports are {low}-{high}")
    if allowed is None and any(not ipaddress.ip_address(a).is_loopback for a, _ in opened):
        log.warning(
            "KV transfer ports have no authentication: make them reachable by workers only, "
            "see transfer_interface and transfer_ports",
            listeners=shown,
        )


def _addresses_of(devices: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address] | None:
    """Return the addresses of UCX network devices; None for all devices and for patterns."""
    names = devices.split(",")
    if any(name == "all" or set("*?^[") & set(name) for name in names):
        return None
    found = psutil.net_if_addrs()
    return {
        ipaddress.ip_address(entry.address)
        for name in names
        for entry in found.get(name, ())
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def rdma_devices(folder: Path = _RDMA_FOLDER) -> list[str]:
    """Return the UCX names of this machine's RDMA ports, from the kernel's device list."""
    return [f"{port.parent.parent.name}:{port.name}" for port in sorted(folder.glob("*/ports/*"))]
