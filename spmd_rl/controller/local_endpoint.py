"""Endpoint of a role on its own rank: the method, and how its values cross the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmd_rl.controller.channel.codec import Codec
from spmd_rl.controller.endpoint import Role, Signature, endpoints


@dataclass(frozen=True, slots=True)
class LocalEndpoint:
    """One endpoint of a role of this rank; `name` is "role.endpoint"."""

    name: str
    parameters: tuple[str, ...]
    method: Callable[..., Any]
    arguments: Codec
    result: Codec


def bind(role_name: str, role: Role, endpoint_name: str) -> LocalEndpoint:
    """Return an endpoint of `role`, which takes all its arguments by position."""
    signature = Signature(endpoints(type(role))[endpoint_name])
    return LocalEndpoint(
        name=f"{role_name}.{endpoint_name}",
        parameters=signature.names,
        method=signature.method(role),
        arguments=signature.arguments,
        result=signature.result,
    )
