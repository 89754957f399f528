"""Where the controller listens, and how that is chosen."""

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
    """What a worker must know to dial: the endpoint and this life's number.

    Neither is to be trusted: only who holds the secret can be the controller.
    """

    endpoint: str
    generation: int


def bind_address(world: World, folder: Path) -> str:
    """What the controller binds: a socket file in its own 0700 folder, or one named interface across nodes.

    Raises: ConfigError when the interface is unknown, all of them, or cannot be reached from other nodes.
    """
    if world.num_nodes == 1:
        path = folder / "controller.sock"
        return f"ipc://{path}" if len(str(path)) < MAX_IPC_PATH else "tcp://127.0.0.1:*"
    interface = os.environ.get(INTERFACE_ENV) or _address_of(os.environ["MASTER_ADDR"])
    if interface in ("*", "0.0.0.0", "::", "[::]"):
        raise ConfigError(f"{INTERFACE_ENV} = '{interface}' is every interface: name one, such as eth0 or its address")
    if interface.startswith("127."):
        raise ConfigError(
            f"the controller would listen on {interface}, which other nodes cannot reach: "
            f"set {INTERFACE_ENV} to the interface or address that they can"
        )
    return f"tcp://{interface}:*"


def _address_of(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR = '{host}' has no address ({error}): set {INTERFACE_ENV}") from error
