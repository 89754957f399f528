"""Address of the controller: where it listens, and how that is chosen."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.world import World

INTERFACE_ENV = "SPMD_RL_INTERFACE"
MAX_IPC_PATH = 100


@dataclass(frozen=True)
class Address:
    """The endpoint that a worker connects to, and the generation of this start of the run.

    Neither is trusted: only a process that holds the secret can be the controller.
    """

    endpoint: str
    generation: int


def bind_address(world: World, folder: Path) -> str:
    """Return the address that the controller binds.

    On one node it is a socket file in the controller's own folder of mode 0700; across nodes it is
    one interface.
    Raises: ConfigError when the interface is unknown, stands for all of them, or cannot be reached
    from other nodes.
    """
    if world.num_nodes == 1:
        path = folder / "controller.sock"
        return f"ipc://{path}" if len(str(path)) < MAX_IPC_PATH else "tcp://127.0.0.1:*"
    interface = os.environ.get(INTERFACE_ENV) or os.environ["MASTER_ADDR"]
    if interface in ("*", "0.0.0.0", "::", "[::]"):
        raise ConfigError(
            f"{INTERFACE_ENV} = '{interface}' stands for every interface: "
            "name one, such as eth0 or its address"
        )
    if interface in {name for _, name in socket.if_nameindex()}:
        return f"tcp://{interface}:*"
    address = _address_of(interface)
    if address.is_loopback:
        raise ConfigError(
            f"the controller would listen on {interface}, which other nodes cannot reach: "
            f"set {INTERFACE_ENV} to the interface or address that they can"
        )
    return f"tcp://[{address}]:*" if address.version == 6 else f"tcp://{address}:*"


def is_ipv6(endpoint: str) -> bool:
    """Return whether a socket needs ZeroMQ's IPv6 option to bind `endpoint` or connect to it."""
    return endpoint.startswith("tcp://[")


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a host, an IPv4 one if it has any.

    Raises: ConfigError when it has none.
    """
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"'{host}' is no interface of this host and has no address ({error}): "
            f"set {INTERFACE_ENV} to the interface or address that other nodes can reach"
        ) from error
    first = min(addresses, key=lambda address: address[0] != socket.AF_INET)
    return ipaddress.ip_address(first[4][0])
