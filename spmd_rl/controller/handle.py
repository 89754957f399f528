"""The controller's stand-in for a role: its endpoints with `.call` and `.start`, and nothing else."""

from __future__ import annotations

import difflib
from typing import Any, NoReturn

from spmd_rl.controller.codec import Packed, pack
from spmd_rl.controller.endpoint import Bound, Endpoint, Role, Signature, endpoints
from spmd_rl.controller.pending import Pending
from spmd_rl.controller.router import Values
from spmd_rl.controller.switchboard import Switchboard
from spmd_rl.controller.wire import Call
from spmd_rl.errors import ContractError
from spmd_rl.mesh.split import Placement


class Handle:
    """One spawned role. To the type checker it is the role's class, whose endpoints have the same faces."""

    def __init__(self, name: str, role: type[Role], placement: Placement, board: Switchboard) -> None:
        self.name = name
        self.placement = placement
        self.board = board
        by_data_rank: list[list[int]] = [[] for _ in range(placement.data_size)]
        for rank in placement.ranks:
            by_data_rank[placement.data_rank(rank)].append(rank)
        self.shards = [tuple(ranks) for ranks in by_data_rank]
        self.endpoints = {key: RemoteEndpoint(self, endpoint) for key, endpoint in endpoints(role).items()}

    def __getattr__(self, name: str) -> RemoteEndpoint:
        if name.startswith("_") or name not in self.endpoints:
            near = difflib.get_close_matches(name, self.endpoints, 1) or sorted(self.endpoints)
            raise AttributeError(f"{self.name} has no endpoint '{name}': did you mean {' or '.join(near)}?")
        return self.endpoints[name]


class RemoteEndpoint(Bound[..., Any]):
    """An endpoint of a role that lives on workers."""

    def __init__(self, handle: Handle, endpoint: Endpoint[..., Any]) -> None:
        self._handle = handle
        self._endpoint = endpoint
        self._signature = Signature(endpoint)
        self._what = f"{handle.name}.{endpoint.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ContractError(f"{self._what} lives on workers: use {self._what}.call(...) or .start(...)")

    def start(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Issue the call to its ranks, each with its shard of the arguments."""
        board, placement = self._handle.board, self._handle.placement
        arguments = self._signature.bind(args, kwargs)
        ranks = (min(placement.ranks, key=board.calls.num_owed),) if self._endpoint.local else placement.ranks
        values = self._packed(arguments, ranks)
        record = board.calls.open(self._what, ranks)
        board.issue(record, Call(self._handle.name, self._endpoint.name, record.phase), values)
        return Pending(lambda deadline_s: self._finish(ranks, board.collect(record, deadline_s)))

    def _packed(self, arguments: dict[str, Any], ranks: tuple[int, ...]) -> Values:
        """The packed arguments by the ranks that receive them: each value is packed once."""
        if not self._signature.scatters:
            return {ranks: pack(arguments)}
        shards = self._handle.shards
        scattered = self._signature.scatter(arguments, len(shards))
        return {ranks: pack(own) for ranks, own in zip(shards, scattered, strict=True)}

    def _finish(self, ranks: tuple[int, ...], by_rank: dict[int, Packed]) -> Any:
        if not self._signature.gathers:
            return self._value(by_rank, ranks)
        return self._signature.gather([self._value(by_rank, shard) for shard in self._handle.shards])

    def _value(self, by_rank: dict[int, Packed], ranks: tuple[int, ...]) -> Any:
        """The one answer of ranks that must agree. Raises: ContractError naming those that do not."""
        expected = by_rank[ranks[0]]
        if len(ranks) > 1 and (odd := [rank for rank in ranks if by_rank[rank] != expected]):
            differs = f"the result of ranks {odd} differs from rank {ranks[0]}'s"
            raise ContractError(f"{self._what}: {differs}; mark it Sharded or agree")
        return self._signature.result.unpack(expected)
