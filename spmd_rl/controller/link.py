"""Link between two roles, which carries the weights of one to the other at every push."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.capabilities import WeightProvider, WeightReceiver
from spmd_rl.controller.contracts import not_promised, record_contracts
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.weight_sync import PlanSummary, RankLayouts, RankPush, WeightSync
from spmd_rl.errors import ConfigError, WeightMismatchError
from spmd_rl.mesh.split import Placement
from spmd_rl.weights.proof.verdict import WeightMismatch


@dataclass(frozen=True)
class PushStats:
    """Bytes, time and route of a push; a route is "alias", "copy", "buckets" or "copy+buckets".

    Of `num_tensors` on all ranks of the destination, `num_verified` were compared with the source
    and hold its bits, and `num_shared` are its memory. `verify_s` is the slowest rank's; it is None
    where the push was not compared.
    """

    bytes_moved: int
    seconds: float
    route: str
    num_tensors: int = 0
    num_verified: int = 0
    num_shared: int = 0
    verify_s: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return what the comparison found as metrics of a step; none where there was none."""
        if self.verify_s is None:
            return {}
        return {
            "time/verify": self.verify_s,
            "sync/tensors": self.num_tensors,
            "sync/verified_tensors": self.num_verified,
            "sync/shared_tensors": self.num_shared,
        }


class Link:
    """Two roles' weights, connected by one plan that every push replays.

    Every `run.verify_every`-th push is compared (0: none), and with `run.self_check` the first also
    shows that the comparison finds a wrong bit. `record` is given the metrics of each push that is
    committed.
    """

    def __init__(
        self,
        weight_sync: WeightSync,
        plan: PlanSummary,
        ends: tuple[str, str],
        run: RunConfig,
        record: Callable[[Mapping[str, float]], None],
    ) -> None:
        self._weight_sync = weight_sync
        self.plan = plan
        self._ends = ends
        self._run = run
        self._record = record
        self._num_pushes = 0

    def push(self, version: int, *, drain: bool = True) -> PushStats:
        """Copy the source's weights to the destination, and commit them as `version` on every rank
        or on none.

        Requests that run are finished first. Without `drain` they go on under the new weights: the
        push takes place between two steps of the engine, which then computes their KV again.

        Blocks: until both ends are idle, or between two steps; then until every rank has committed.
        The run's deadline ends it.
        Raises: WeightMismatchError naming a tensor that does not hold the source's bits. Then
        nothing is committed, and the destination generates nothing.
        """
        began, run = time.monotonic(), self._run
        barrier, transfer = self._weight_sync.barrier, self._weight_sync.transfer
        if not drain:
            barrier, transfer = barrier.between_steps(), transfer.between_steps()
        if self.plan.wire_bytes:  # else no rank waits for another inside `transfer`
            barrier.call()
        verify = run.verify_every > 0 and self._num_pushes % run.verify_every == 0
        ranks = transfer.call(verify)
        self._refuse_mismatch(ranks, f"push of version {version}")
        if verify and run.self_check and not self._num_pushes:
            self._check_comparison(ranks)
        self._weight_sync.commit.call(version)
        self._num_pushes += 1
        stats = _stats(ranks, time.monotonic() - began)
        self._record(stats.metrics())
        return stats

    def _check_comparison(self, ranks: list[RankPush]) -> None:
        """Push one tensor with a wrong bit, see that the comparison finds it, and push it again.

        Where all tensors are shared memory, there is nothing that could differ.
        Raises: WeightMismatchError when the comparison found nothing.
        """
        names = [rank.verification.smallest for rank in ranks if rank.verification is not None]
        name = min(filter(None, names), default="")
        if not name:
            return
        try:
            perturbed = self._weight_sync.transfer_one.call(name, perturb=True)
            self._refuse_mismatch(perturbed, "self-check")
        except WeightMismatchError as error:
            if error.tensor == name:
                restored = self._weight_sync.transfer_one.call(name, perturb=False)
                self._refuse_mismatch(restored, "push after the self-check")
                return
            raise
        raise WeightMismatchError(
            f"self-check of pushes from {' to '.join(self._ends)}: a wrong bit in tensor '{name}' "
            "was not noticed, so the comparison of weights cannot be trusted "
            "(run.self_check = false skips this test)",
            name,
        )

    def _refuse_mismatch(self, ranks: list[RankPush], what: str) -> None:
        """Raise a WeightMismatchError if a rank has found one."""
        for rank in ranks:
            for found in rank.verification.mismatches if rank.verification else ():
                raise WeightMismatchError(_sentence(found, what, *self._ends), found.name)


def _sentence(found: WeightMismatch, what: str, source: str, destination: str) -> str:
    sources = ", ".join(map(str, found.sources))
    box = f"tensor '{found.name}' (from {list(found.box.offset)}, extent {list(found.box.extent)})"
    if found.is_replica:
        return f"{what}: ranks {sources} and {found.rank} of {source} hold different bits of {box}"
    return (
        f"{what}: {box} of {destination} on rank {found.rank} does not hold the bits of {source} "
        f"on rank {sources} (route: {found.route}), so {destination} generates nothing with it"
    )


def _route(copied_bytes: int, received_bytes: int) -> str:
    sizes = {"copy": copied_bytes, "buckets": received_bytes}
    return "+".join(name for name, size in sizes.items() if size) or "alias"


def _stats(ranks: list[RankPush], seconds: float) -> PushStats:
    copied = sum(rank.traffic.copied_bytes for rank in ranks)
    received = sum(rank.traffic.received_bytes for rank in ranks)
    checks = [rank.verification for rank in ranks if rank.verification is not None]
    num_verified = sum(check.num_equal for check in checks)
    num_shared = sum(check.num_shared for check in checks)
    return PushStats(
        copied + received,
        seconds,
        _route(copied, received),
        num_tensors=num_verified + num_shared + sum(check.num_unknown for check in checks),
        num_verified=num_verified,
        num_shared=num_shared,
        verify_s=max((check.seconds for check in checks), default=None),
    )


def link_placement(source: Handle, destination: Handle) -> Placement:
    """Return the placement of the link between two roles: the ranks of both.

    Raises: ConfigError when one of the roles has no weights to give, or to receive.
    """
    for handle, capability in ((source, WeightProvider), (destination, WeightReceiver)):
        if capability not in handle.capabilities:
            raise ConfigError(
                f"{source.name} cannot be linked to {destination.name}: "
                f"let the class of {handle.name} inherit from rl.{capability.__name__}"
            )
    ranks = tuple(sorted({*source.placement.ranks, *destination.placement.ranks}))
    axes = {"dp": len(ranks), "fsdp": 1, "tp": 1}
    return Placement(f"{source.name}->{destination.name}", ranks, axes)


def connect(
    weight_sync: WeightSync, placement: Placement, run_folder: Path, exact: bool
) -> list[RankLayouts]:
    """Have the ranks of a link compare their numeric contracts, and return their layouts alone.

    Raises: ContractError if they must be `exact` and could not have the same bits.
    """
    layouts = weight_sync.layouts.call()
    contracts = {
        f"{name} on rank {rank}": contract
        for rank, of_rank in zip(placement.ranks, layouts, strict=True)
        for name, contract in of_rank.contracts.items()
    }
    record_contracts(run_folder, placement.name, contracts, exact)
    if exact and (facts := not_promised(contracts)):
        print(f"{placement.name}: equal bits are not promised here: {facts}", flush=True)
    return [replace(of_rank, contracts={}) for of_rank in layouts]
