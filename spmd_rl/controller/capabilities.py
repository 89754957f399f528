"""Capabilities of a role: protocols that name the methods which a controller or a link calls on it.

A role has a capability when its class has every method of the protocol. Inherit from the protocol
to say so: then `spawn` also refuses a class whose only method of it is misspelt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from spmd_rl.controller.contracts import Contract
from spmd_rl.controller.endpoint import Endpoint, Role, Sharded, collective, local
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.split import Placement
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.offload.residency import Receipt

if TYPE_CHECKING:
    from spmd_rl.controller.turns.shard_turns import ShardTurns
    from spmd_rl.weights.ends import WeightSink, WeightSource


@runtime_checkable
class Contracted(Protocol):
    """A role whose bits depend on facts that its ranks, and the other end of a link, must share."""

    def numeric_contract(self) -> Contract:
        """Return the facts that the bits of this role's results depend on, besides the weights."""
        ...


@runtime_checkable
class WeightProvider(Protocol):
    """A role whose weights a link can push to another role."""

    def weight_source(self) -> WeightSource:
        """Return this rank's share of the weights."""
        ...

    def call_before_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` before each later change of the weights."""
        ...

    def on_weights_pushed(self, version: int) -> None:
        """Note that the weights which were just pushed are called `version`."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """A role that a link can push weights to."""

    def weight_sink(self) -> WeightSink:
        """Return where pushed weights go on this rank. Its `commit` gives them their version."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A role that gives memory back while a role in the same processes needs it.

    A role whose memory sleeps in parts names them in a class attribute `MEMORY_TAGS`; another has
    methods without `tags`, and may return None.
    """

    @collective
    def sleep(self, tags: tuple[str, ...] = ()) -> Sharded[list[Receipt]]:
        """Give the memory under `tags` back; () means all of it. Return a receipt of each rank."""
        return []

    @collective
    def wake(self, tags: tuple[str, ...] = ()) -> Sharded[list[Receipt]]:
        """Take the memory under `tags` again. Raises: ResidencyError where too little is left."""
        return []


@runtime_checkable
class MemoryPlanner(Protocol):
    """A role whose class says, before a run starts, what memory it will take."""

    @classmethod
    def planned_memory(
        cls, cfg: Any, placement: Placement, model: str, on_gpu: bool
    ) -> Sequence[TagBytes]:
        """Return what the role takes of one rank of `placement`, by tag. It imports no torch.

        `model` is the Hugging Face folder that the role is spawned with, "" for none. `on_gpu` says
        whether the run is planned for GPUs.
        """
        ...


@runtime_checkable
class Saver(Protocol):
    """A role that can be part of a run's checkpoint."""

    @collective
    def save(self, folder: str) -> None:
        """Copy the state of this moment, and begin to write it to `folder`."""

    @collective
    def wait_until_saved(self) -> None:
        """Wait until the last `save` is on disk. Raises: SpmdError when it could not be written."""

    @collective
    def load(self, folder: str) -> Any:
        """Continue from the state in `folder`."""

    @local
    def resume_differences(self) -> list[str]:
        """Return why the run does not continue bit for bit from what was loaded, as clauses."""
        return []


@runtime_checkable
class Pumped(Protocol):
    """A role with endpoints that return a `Deferred`: between commands, its rank calls `pump`.

    An error that `pump` raises answers every call of the role that is unanswered on the rank.
    """

    def has_work(self) -> bool:
        """Whether `pump` should be called at once, without waiting for anything."""
        ...

    def pump(self) -> None:
        """Do one piece of work, such as an engine step, and answer the calls that it completes.

        It is called between all commands while a call is unanswered, a few times a second at least.
        """
        ...

    def watched(self) -> Sequence[int]:
        """Return file descriptors that are readable when `pump` should be called."""
        ...


@runtime_checkable
class InTurns(Protocol):
    """A pumped role whose ranks take turns together: those of a shard, and those along the axis ep.

    Each rank along ep has calls of its own, and `has_work` says whether it has a reason for a step.
    In a shard with several ranks, the first decides what all do. Both methods are called while a
    call is unanswered on one of the ranks, and each rank waits in them for the others.
    """

    def pump_in_step(self, steps: bool) -> None:
        """Do what `pump` does, with a step if `steps` is set, and without one if not.

        Ranks: all along ep, with the same `steps`. Blocks: in a step, until the others take it.
        """
        ...

    def pump_in_shard(self, turns: ShardTurns[Any]) -> None:
        """Do what `pump` does, as the first rank of the shard tells.

        Ranks: all of a shard with several. Blocks: until the others are called.
        """
        ...


CAPABILITIES: tuple[type, ...] = (
    Contracted,
    WeightProvider,
    WeightReceiver,
    Sleeper,
    MemoryPlanner,
    Saver,
    Pumped,
    InTurns,
)


def capabilities(role: type[Role]) -> frozenset[type]:
    """Return the capabilities that a role's class has.

    Raises: ConfigError naming a method that the class lacks although it has others of the same
    capability, or one that the controller cannot call.
    """
    as_key: Any = role  # mypy takes no class for hashable
    return _capabilities(as_key)


@cache
def _capabilities(role: type[Role]) -> frozenset[type]:
    return frozenset(protocol for protocol in CAPABILITIES if _has(role, protocol))


def _has(role: type[Role], protocol: type) -> bool:
    methods = {name: item for name, item in vars(protocol).items() if not name.startswith("_")}
    missing = [name for name, method in methods.items() if _lacks(role, name, method)]
    if len(missing) == len(methods) and protocol not in role.__mro__:
        return False
    if missing:
        raise ConfigError(
            f"{role.__name__} is no complete {protocol.__name__}: "
            f"it lacks the method {' and '.join(missing)} "
            f"(a {protocol.__name__} has {', '.join(methods)})"
        )
    _require_endpoints(role, protocol, methods)
    return True


def _lacks(role: type[Role], name: str, method: Any) -> bool:
    """Whether a role has no method of this name, or only that of the protocol."""
    own = inspect.getattr_static(role, name, None)
    return own is None or own is method


def _require_endpoints(role: type[Role], protocol: type, methods: dict[str, Any]) -> None:
    """Raises: ConfigError when the controller cannot call a method that it calls on `protocol`."""
    for name, method in methods.items():
        own = inspect.getattr_static(role, name)
        if isinstance(method, Endpoint) and not isinstance(own, Endpoint):
            raise ConfigError(
                f"{role.__name__}.{name} must be marked @collective or @local: "
                f"the controller calls it on every {protocol.__name__}"
            )
