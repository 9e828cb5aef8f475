# SPDX-License-Identifier: Apache-2.0
"""Reading a machine's network. Made up: sysfs, in a folder; real: two tests' own machine."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from raydist.network import Interface, RdmaDevice, inventory, routes
from raydist.network.inventory import network_variables, read_interfaces, read_rdma


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def _link(root: Path, name: str, target: str) -> None:
    (root / target).mkdir(parents=True, exist_ok=True)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).symlink_to(root / target)


def _four(address: str, netmask: str | None) -> SimpleNamespace:
    return SimpleNamespace(family=socket.AF_INET, address=address, netmask=netmask)


def _six(address: str, netmask: str | None) -> SimpleNamespace:
    return SimpleNamespace(family=socket.AF_INET6, address=address, netmask=netmask)


def _state(isup: bool = True, mtu: int = 1500) -> SimpleNamespace:
    return SimpleNamespace(isup=isup, mtu=mtu)


def test_interfaces_carry_prefix_speed_mtu_and_kind(tmp_path: Path) -> None:
    net = "sys/class/net"
    _write(
        tmp_path,
        {
            f"{net}/ens5/type": "1",
            f"{net}/ens5/speed": "100000",
            f"{net}/ens5/operstate": "up",
            f"{net}/ens5/uevent": "INTERFACE=ens5\nIFINDEX=2",
            f"{net}/bond0/type": "1",
            f"{net}/bond0/uevent": "DEVTYPE=bond\nINTERFACE=bond0",
            f"{net}/bond0/speed": "-1",
            f"{net}/eth9/speed": "4294967295",
            f"{net}/eth9/operstate": "down",
            f"{net}/wg0/operstate": "unknown",
            "proc/net/vlan/storage": "",
        },
    )
    _link(tmp_path, f"{net}/ens5/device", "sys/devices/ens5")
    _link(tmp_path, "sys/devices/ens5/driver", "sys/bus/pci/drivers/ena")
    addresses = {
        "ens5": [
            _four("10.0.0.5", "255.255.240.0"),
            _six("2001:DB8::5", "ffff:ffff:ffff:ffff::"),
            _six("fe80::1%ens5", "ffff:ffff:ffff:ffff::"),
            SimpleNamespace(family=17, address="02:00:00:00:00:01", netmask=None),
        ],
        "bond0": [_four("10.1.0.5", "255.255.255.0")],
        "wg0": [_four("100.64.0.1", None)],
        "storage": [_four("10.9.0.5", "255.255.0.0")],
    }
    states = {
        "ens5": _state(mtu=9001), "bond0": _state(), "eth9": _state(),
        "wg0": _state(mtu=1420), "storage": _state(isup=False),
    }  # fmt: skip
    assert read_interfaces(addresses, states, root=tmp_path) == (
        Interface(name="bond0", addresses=("10.1.0.5/24",), kind="bond"),
        Interface(
            name="ens5",
            addresses=("10.0.0.5/20", "2001:db8::5/64", "fe80::1/64"),
            speed_mbps=100_000,
            mtu=9001,
        ),
        Interface(name="eth9", addresses=(), is_up=False, kind="virtual"),
        Interface(name="storage", addresses=("10.9.0.5/16",), is_up=False, kind="vlan"),
        Interface(name="wg0", addresses=("100.64.0.1/32",), kind="vpn", mtu=1420),
    )


def test_rdma_devices_carry_kind_state_rate_and_interface(tmp_path: Path) -> None:
    ib = "sys/class/infiniband"
    _write(
        tmp_path,
        {
            f"{ib}/mlx5_0/ports/1/state": "4: ACTIVE",
            f"{ib}/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
            f"{ib}/mlx5_0/ports/1/link_layer": "InfiniBand",
            f"{ib}/mlx5_0/ports/2/state": "1: DOWN",
            f"{ib}/mlx5_0/ports/2/rate": "2.5 Gb/sec (1X SDR)",
            f"{ib}/mlx5_0/ports/2/link_layer": "Ethernet",
            f"{ib}/rdmap0s6/ports/1/state": "4: ACTIVE",
            f"{ib}/rdmap0s6/ports/1/link_layer": "Unspecified",
            f"{ib}/mlx5_0/device/net/ib0/type": "32",
        },
    )
    _link(tmp_path, f"{ib}/rdmap0s6/device/driver", "sys/bus/pci/drivers/efa")
    assert read_rdma(root=tmp_path) == (
        RdmaDevice(name="mlx5_0", kind="infiniband", interface="ib0", speed_mbps=200_000),
        RdmaDevice(
            name="mlx5_0", kind="roce", port=2, is_active=False, interface="ib0", speed_mbps=2500
        ),
        RdmaDevice(name="rdmap0s6", kind="efa"),
    )


def test_rdma_of_a_machine_without_is_empty(tmp_path: Path) -> None:
    assert read_rdma(root=tmp_path) == ()


def test_variables_are_those_of_the_network_and_proxies_lose_their_credentials() -> None:
    assert network_variables(
        {
            "NCCL_SOCKET_IFNAME": "=ib0",
            "GLOO_SOCKET_IFNAME": "ens5",
            "FI_PROVIDER": "efa",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "100",
            "MASTER_ADDR": "10.0.0.5",
            "https_proxy": "http://user:s3cret@proxy:3128/",
            "HTTP_PROXY": "user:s3cret@proxy:3128",
            "NO_PROXY": "10.0.0.0/8,.local",
            "AWS_SECRET_ACCESS_KEY": "s3cret",
            "PATH": "/bin",
        }
    ) == {
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ens5",
        "FI_PROVIDER": "efa",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "100",
        "MASTER_ADDR": "10.0.0.5",
        "https_proxy": "http://proxy:3128/",
        "HTTP_PROXY": "proxy:3128",
        "NO_PROXY": "10.0.0.0/8,.local",
    }


def test_route_to_oneself_starts_there_and_a_name_has_none() -> None:
    assert routes(["127.0.0.1", "no-such-host.invalid"]) == {"127.0.0.1": "127.0.0.1"}


def test_inventory_of_this_machine_has_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    found = inventory(node_id="a", address="127.0.0.1")
    assert found.node == socket.gethostname()
    assert found.carrier is not None
    assert found.carrier.kind == "loopback"
    assert found.environment["NCCL_SOCKET_IFNAME"] == "^docker0"


def test_inventory_where_the_own_name_does_not_resolve_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert inventory(node_id="a", address="127.0.0.1").resolves_to == ()
