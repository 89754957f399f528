"""Handle of a role: its endpoints, which the controller calls with `.call` and `.start`."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from spmd_rl.config.likely import likely_name
from spmd_rl.controller.capabilities import InTurns, capabilities
from spmd_rl.controller.channel.codec import NOTHING, Packed, pack
from spmd_rl.controller.channel.messages import Call, CallBeside, encode
from spmd_rl.controller.channel.router import Post, Values
from spmd_rl.controller.channel.shared_arrays import Outgoing
from spmd_rl.controller.endpoint import BoundEndpoint, Endpoint, Role, Signature, endpoints
from spmd_rl.controller.lifecycle.calls import CallRecord
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.controller.pending import Pending
from spmd_rl.controller.routing import ShardBalancer
from spmd_rl.controller.turns.join import STEP_AXES
from spmd_rl.errors import ContractError
from spmd_rl.mesh.axes import DATA
from spmd_rl.mesh.split import Placement
from spmd_rl.offload.phases import ALL, Tags


class Handle:
    """One spawned role. To the type checker it is the role's class, whose endpoints have the same
    methods.

    Raises: ConfigError when the role has only part of a capability.
    """

    def __init__(
        self,
        name: str,
        role: type[Role],
        placement: Placement,
        dispatcher: Dispatcher,
        num_parts: int = 0,
    ) -> None:
        self.name = name
        self.num_parts = num_parts  # of Sharded data, on all ranks; 0: one for each shard
        self.placement = placement
        self.capabilities = capabilities(role)
        self.memory_tags: Tags = getattr(role, "MEMORY_TAGS", ALL)
        self.dispatcher = dispatcher
        self.shards = placement.shards
        self.balancer = ShardBalancer(len(self.shards))
        self.endpoints = {
            key: RemoteEndpoint(self, endpoint) for key, endpoint in endpoints(role).items()
        }

    @property
    def saved_axes(self) -> dict[str, int]:
        """What the order of sums over ranks follows from, as a checkpoint keeps it."""
        axes = dict(self.placement.axes)
        if not self.num_parts:
            return axes
        return {name: axes[name] for name in axes if name not in DATA} | {"parts": self.num_parts}

    def __getattr__(self, name: str) -> RemoteEndpoint:
        if name.startswith("_") or name not in self.endpoints:
            near = likely_name(name, self.endpoints) or " or ".join(sorted(self.endpoints))
            raise AttributeError(f"{self.name} has no endpoint '{name}': did you mean {near}?")
        return self.endpoints[name]


class RemoteEndpoint(BoundEndpoint[..., Any]):
    """An endpoint of a role that lives on workers."""

    def __init__(
        self, handle: Handle, endpoint: Endpoint[..., Any], *, concurrent: bool | None = None
    ) -> None:
        self._handle = handle
        self._endpoint = endpoint
        self._concurrent = endpoint.concurrent if concurrent is None else concurrent
        self._signature = Signature(endpoint)
        self._call_name = f"{handle.name}.{endpoint.name}"
        self._headers: dict[str, bytes] = {}  # of the call, by phase

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ContractError(
            f"{self._call_name} lives on workers: use {self._call_name}.call(...) or .start(...)"
        )

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Issue the call and wait for its value."""
        return self._finish(self._issue(args, kwargs))

    def start(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Issue the call to its ranks, each with its shard of the arguments."""
        record = self._issue(args, kwargs)
        return Pending(functools.partial(self._finish, record), record)

    def between_steps(self) -> RemoteEndpoint:
        """Return this endpoint with calls that start while earlier ones are unanswered."""
        return RemoteEndpoint(self._handle, self._endpoint, concurrent=True)

    def _issue(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRecord:
        dispatcher, ranks = self._handle.dispatcher, self._handle.placement.ranks
        arguments = self._signature.bind(args, kwargs)
        route = self._endpoint.route and self._endpoint.route(*arguments)
        shard = 0
        if route is not None:
            shard = self._handle.balancer.acquire(route)
            ranks = self._handle.shards[shard]
        elif self._endpoint.local:
            ranks = (min(ranks, key=dispatcher.calls.num_unanswered),)
        outgoing = None if dispatcher.shared is None else Outgoing(dispatcher.shared)
        values = self._packed(arguments, ranks, outgoing)
        files = () if outgoing is None else outgoing.files
        record = dispatcher.calls.open(self._call_name, ranks, files)
        if route is not None:
            release = functools.partial(self._handle.balancer.release, route, shard)
            record.call_when_done(release)
        header = self._headers.get(record.phase)
        if header is None:
            header = self._headers[record.phase] = encode(
                Call(self._handle.name, self._endpoint.name, record.phase, self._concurrent)
            )
        dispatcher.calls.issue(record, header, values, self._beside(ranks, record.number))
        return record

    def _beside(self, ranks: tuple[int, ...], number: int) -> list[Post]:
        """Return what goes to the ranks that step together with those of a call, if it goes to some
        of them alone.
        """
        handle, route = self._handle, self._endpoint.route
        if route is None or InTurns not in handle.capabilities:
            return []
        together = {one for rank in ranks for one in handle.placement.ranks_along(rank, STEP_AXES)}
        others = tuple(sorted(together.difference(ranks)))
        beside = encode(CallBeside(handle.name, self._concurrent))
        return [(beside, [(others, NOTHING)], number)] if others else []

    def _packed(
        self, arguments: tuple[Any, ...], ranks: tuple[int, ...], outgoing: Outgoing | None
    ) -> Values:
        """Pack the arguments, each value once; return them with the ranks that receive them."""
        if not self._signature.scatters:
            return [(ranks, pack(arguments, outgoing))]
        shards = self._handle.shards
        scattered = self._signature.scatter(arguments, len(shards), self._handle.num_parts)
        parts = zip(shards, scattered)  # noqa: B905
        return [(ranks, pack(part, outgoing)) for ranks, part in parts]

    def _finish(self, record: CallRecord, deadline_s: float | None = None) -> Any:
        by_rank = self._handle.dispatcher.collect(record, deadline_s)
        signature, values = self._signature, []
        unpack, shared = signature.result.unpack, self._handle.dispatcher.shared
        by_shard = signature.gathers or self._endpoint.route is not None
        for ranks in self._handle.shards if signature.gathers else (record.ranks,):
            # of a deferred call only a shard's first rank knows all, such as rewards
            if len(ranks) > 1 and not (by_shard and signature.is_deferred):
                self._require_equal(by_rank, ranks)
            values.append(unpack(by_rank[ranks[0]], shared))
        return signature.gather(values) if signature.gathers else values[0]

    def _require_equal(self, by_rank: dict[int, Packed], ranks: tuple[int, ...]) -> None:
        """Raises: ContractError naming the `ranks` whose answer differs from that of the first."""
        expected = by_rank[ranks[0]]
        if different := [rank for rank in ranks if not _same(by_rank[rank], expected)]:
            differs = f"the result of ranks {different} differs from rank {ranks[0]}'s"
            raise ContractError(f"{self._call_name}: {differs}; mark it Sharded or agree")


def _same(first: Packed, second: Packed) -> bool:
    """Whether two values have the same bytes; `bytes` objects compare faster than memory views."""
    return first[0] == second[0] and bytes(first[1]) == bytes(second[1])
