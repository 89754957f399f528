"""Endpoint of a role on its own rank: the method, and how its values cross the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmd_rl.controller.channel.codec import Codec, Packed
from spmd_rl.controller.channel.shared_arrays import Outgoing, SharedArrays
from spmd_rl.controller.endpoint import Role, Signature, endpoints


@dataclass(frozen=True, slots=True)
class LocalEndpoint:
    """One endpoint of a role of this rank; `name` is "role.endpoint".

    The controller reads the answer of a rank that `shares_arrays`, rather than to compare it with
    the answers of others.
    """

    name: str
    parameters: tuple[str, ...]
    method: Callable[..., Any]
    arguments: Codec
    result: Codec
    shares_arrays: bool

    def pack(self, value: Any, shared: SharedArrays | None) -> Packed:
        """Encode what the method returned, with large arrays in `shared`."""
        outgoing = Outgoing(shared) if shared is not None and self.shares_arrays else None
        return self.result.pack(value, outgoing)


def bind(role_name: str, role: Role, endpoint_name: str) -> LocalEndpoint:
    """Return an endpoint of `role`, which takes all its arguments by position."""
    endpoint, context = endpoints(type(role))[endpoint_name], role.context
    signature = Signature(endpoint)
    is_of_shard = signature.gathers or endpoint.route is not None
    is_not_compared = context.shard_size == 1 or signature.is_deferred
    return LocalEndpoint(
        name=f"{role_name}.{endpoint_name}",
        parameters=signature.names,
        method=signature.method(role),
        arguments=signature.arguments,
        result=signature.result,
        shares_arrays=is_of_shard and is_not_compared and context.shard_rank == 0,
    )
