"""Rules for the network devices and ports of UCX."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from services.common.addresses import is_loopback
from services.common.errors import SettingsError
from services.decode.settings import DecodeSettings
from services.transfer.agent import TransferAgent
from services.transfer.bindings import load_nixl
from services.transfer.network import (
    TransferNetwork,
    check_listeners,
    rdma_devices,
    restrict_ucx,
    ucx_environment,
)
from tests.ports import free_ports

RDMA = ["mlx5_0:1", "mlx5_1:1"]
LOOPBACK = TransferNetwork(loopback=True)

LIST_LISTENERS = """
import psutil, sys
from services.transfer.agent import TransferAgent
from services.transfer.network import TransferNetwork
agents = [TransferAgent(f"agent-{at}", network=TransferNetwork(True, None, sys.argv[1]))
          for at in range(2)]
listeners = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
for agent in agents:
    agent.close()
print(*(f"{ip} {port}" for ip, port in listeners), sep="\\n")
"""


def test_loopback_host_restricts_ucx_to_the_loopback_device() -> None:
    assert ucx_environment(LOOPBACK, RDMA, {}) == {"UCX_NET_DEVICES": "lo"}


def test_named_interface_keeps_rdma_devices() -> None:
    network = TransferNetwork(interface="eth0")
    assert ucx_environment(network, RDMA, {}) == {"UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1,eth0"}
    assert ucx_environment(network, [], {}) == {"UCX_NET_DEVICES": "eth0"}


def test_without_an_interface_ucx_chooses_devices() -> None:
    assert ucx_environment(TransferNetwork(), RDMA, {}) == {}


def test_port_range_is_passed_to_ucx() -> None:
    network = TransferNetwork(ports="21000-21010")
    assert ucx_environment(network, RDMA, {}) == {"UCX_TCP_PORT_RANGE": "21000-21010"}


@pytest.mark.parametrize("network", [LOOPBACK, TransferNetwork(interface="eth0")])
def test_variables_of_the_user_take_precedence(network: TransferNetwork) -> None:
    given = {"UCX_NET_DEVICES": "eth1", "UCX_TCP_PORT_RANGE": "1-2"}
    assert ucx_environment(network, RDMA, given) == {}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.5", False),
        ("node-7", False),
    ],
)
def test_loopback_hosts_are_recognized(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_rdma_ports_have_ucx_names(tmp_path: Path) -> None:
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/1", "mlx5_0/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    assert rdma_devices(tmp_path) == ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1"]
    assert rdma_devices(tmp_path / "absent") == []


def test_unknown_interface_is_a_settings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with pytest.raises(SettingsError, match="eth7 does not exist; this machine has lo, eth0"):
        restrict_ucx(TransferNetwork(interface="eth7"))


def test_agent_refuses_an_unknown_interface() -> None:
    with pytest.raises(SettingsError, match="absent0"):
        TransferAgent("refused", network=TransferNetwork(interface="absent0"))


def test_worker_settings_restrict_the_network() -> None:
    assert DecodeSettings.load([]).transfer_network == LOOPBACK
    flags = ["--host", "10.0.0.5", "--transfer-interface", "eth0"]
    flags += ["--transfer-ports", "21000-21010", "--cluster-token", "secret"]
    expected = TransferNetwork(interface="eth0", ports="21000-21010")
    assert DecodeSettings.load(flags).transfer_network == expected


@pytest.mark.parametrize("ports", ["21000", "21010-21000", "0-70000", "a-b"])
def test_invalid_port_range_is_a_settings_error(ports: str) -> None:
    with pytest.raises(SettingsError, match="transfer_ports"):
        DecodeSettings.load(["--transfer-ports", ports])


def test_loopback_agent_listens_on_loopback_ports_of_its_range_only() -> None:
    """Runs in a separate process, because UCX variables apply to a whole process."""
    first, *_, last = free_ports(51)
    ports = f"{first}-{last}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    command = [sys.executable, "-c", LIST_LISTENERS, ports]
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=100
    )
    listeners = [line.split() for line in done.stdout.splitlines()]
    assert len(listeners) >= 2, "two agents share the range"
    for address, port in listeners:
        assert address == "127.0.0.1"
        assert first <= int(port) <= last


def test_listener_on_another_interface_is_a_settings_error() -> None:
    environment = {"UCX_NET_DEVICES": "mlx5_0:1,lo"}
    check_listeners([("127.0.0.1", 5000)], environment)
    with pytest.raises(SettingsError, match=r"listen on 0.0.0.0 port 5000, .*_DEVICES is mlx5_0:1"):
        check_listeners([("0.0.0.0", 5000)], environment)


def test_listener_outside_the_port_range_is_a_settings_error() -> None:
    environment = {"UCX_TCP_PORT_RANGE": "5000-5001"}
    check_listeners([("127.0.0.1", 5001)], environment)
    with pytest.raises(SettingsError, match=r"port 5002, .* 5000-5001"):
        check_listeners([("127.0.0.1", 5002)], environment)


@pytest.mark.parametrize("devices", [None, "all", "^eth0"])
def test_exposed_listeners_without_named_devices_are_logged(devices: str | None) -> None:
    environment = {} if devices is None else {"UCX_NET_DEVICES": devices}
    with structlog.testing.capture_logs() as logs:
        check_listeners([("127.0.0.1", 5000)], environment)
        check_listeners([], environment)
    assert logs == []
    with structlog.testing.capture_logs() as logs:
        check_listeners([("127.0.0.1", 5000), ("10.0.0.5", 5001)], environment)
    assert [entry["listeners"] for entry in logs] == ["10.0.0.5 port 5001, 127.0.0.1 port 5000"]
    assert logs[0]["log_level"] == "warning"


def test_agent_whose_transport_listens_elsewhere_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")

    with socket.socket() as stray:

        def load_and_listen(network: TransferNetwork) -> object:
            nixl = load_nixl(network)
            create = nixl.nixlAgent

            def create_and_listen(*arguments: object) -> object:
                stray.bind(("0.0.0.0", 0))
                stray.listen()
                return create(*arguments)

            monkeypatch.setattr(nixl, "nixlAgent", create_and_listen)
            return nixl

        monkeypatch.setattr("services.transfer.nixl_agent.load_nixl", load_and_listen)
        with pytest.raises(SettingsError, match=r"0\.0\.0\.0 port .* UCX_NET_DEVICES is lo"):
            TransferAgent("exposed", network=LOOPBACK)
