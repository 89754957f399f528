"""Settings of the gateway, at which agents draw from the policy over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Literal

from spmd_rl.config.rules import at_least, require
from spmd_rl.errors import ConfigError
from spmd_rl.gateway.follow_template import TemplateMode


@dataclass(frozen=True)
class GatewayConfig:
    """Where the gateway listens, and what it bears."""

    host: str = "127.0.0.1"  # address to listen at; another than loopback needs may_connect_from
    may_connect_from: list[str] = field(default_factory=list)  # networks, such as "10.0.0.0/8"
    max_body_mb: int = 16  # of a request
    max_header_kb: int = 64  # of the head of a request
    max_sessions: int = 4096  # that are open in a process
    # that are open in a process; more close the oldest of those that have shown no key
    max_connections: int = 8192
    max_waiting: int = 64  # calls of a session that wait for the engine; more get 429
    keep_alive_s: float = 300.0  # an idle connection stays open for longer than clients keep it
    request_s: float = 15.0  # in which the head of a request must come, and again its body
    heartbeat_s: float = 10.0  # between comments in a stream that draws nothing
    template: TemplateMode = "follow"  # what a chat template rewrites begins anew, or is kept
    # fields of a request that are not known: ignore them by name, in x-spmd-ignored, or refuse them
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    response_template: str = ""  # form of tool calls: a name or a file; "": that of the template

    def __post_init__(self) -> None:
        at_least(
            self,
            {
                "max_body_mb": 1,
                "max_header_kb": 1,
                "max_sessions": 1,
                "max_connections": 1,
                "max_waiting": 1,
            },
        )
        for name in ("keep_alive_s", "request_s", "heartbeat_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        try:
            loopback = ip_address(self.host).is_loopback
        except ValueError as error:
            raise ConfigError(f"host = {self.host!r}: expected an IP address") from error
        self.networks  # noqa: B018  # refuses what is no network
        if not loopback and not self.may_connect_from:
            raise ConfigError(
                f"host = {self.host!r} is not of this machine alone: name the networks that may "
                "connect in may_connect_from"
            )

    @property
    def networks(self) -> list[IPv4Network | IPv6Network]:
        """The networks of which clients may connect. Raises: ConfigError."""
        try:
            return [ip_network(one) for one in self.may_connect_from]
        except ValueError as error:
            raise ConfigError(f"may_connect_from: {error}") from error

    def admits(self, address: str) -> bool:
        """Whether a client of this address may connect."""
        client = ip_address(address)
        return client.is_loopback or any(client in network for network in self.networks)
