"""Endpoints: the methods of a role that the controller may call, and how their values travel.

    class Counter(Role):
        @collective
        def count(self, words: Sharded[list[str]]) -> Sharded[list[int]]: ...

A `Sharded` argument is split over the role's data axis, and a `Sharded` result is joined in its
order. Any other argument goes to every rank, and any other result must be the same on every rank.

An endpoint that returns a `Deferred` answers later. Meanwhile its rank starts only the calls of
endpoints marked `concurrent`; all others wait until nothing is unanswered on that rank.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Annotated, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import numpy as np

from spmd_rl.controller.channel.codec import Codec
from spmd_rl.controller.deferred import Deferred
from spmd_rl.controller.pending import Pending
from spmd_rl.controller.routing import Route
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.mesh.role_context import RoleContext

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_SHARDED = "spmd_rl.sharded"
_SLICED = (list, tuple, np.ndarray)

Sharded = Annotated[T, _SHARDED]


class Role:
    """Base class of the objects that live on ranks; each gets its config and its context."""

    def __init__(self, cfg: Any, context: RoleContext) -> None:
        self.cfg = cfg
        self.context = context

    @classmethod
    def num_data_parts(cls, cfg: Any) -> int:
        """Return how many parts of `Sharded` data the ranks have together; 0: one for each shard.

        Data that has a method `shard(num_shards, num_parts)` is cut so. Other data is not.
        """
        return 0

    def live_counts(self) -> Mapping[str, int]:
        """Return what this rank counts now, for whoever watches the run, by name.

        Ranks: one. It is called once a second, in another thread than all else, and neither waits
        nor raises.
        """
        return {}


class BoundEndpoint(Generic[P, R]):
    """An endpoint of one role: a method on a worker; on a handle, `call` and `start` reach all
    ranks.
    """

    def __init__(self, endpoint: Endpoint[P, R], role: Role) -> None:
        self._endpoint = endpoint
        self._role = role

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._endpoint.function(self._role, *args, **kwargs)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the endpoint and wait for its value."""
        return self.start(*args, **kwargs).wait()

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Issue the endpoint and return at once; the calls of a role run in order of issue."""
        raise ContractError(
            f"{self._endpoint.name} is called through its handle, by the controller only"
        )

    def between_steps(self) -> BoundEndpoint[P, R]:
        """Return this endpoint with calls that start while earlier ones are unanswered."""
        raise ContractError(
            f"{self._endpoint.name} is called through its handle, by the controller only"
        )


class Endpoint(Generic[P, R]):
    """A method that the controller may call: on any one rank if it is `local`, on one shard of the
    role if it has a `route`, else on all ranks together.

    `route` returns, for the arguments of a call, what the choice of the shard depends on. A
    `concurrent` endpoint may start while earlier calls are unanswered.
    """

    def __init__(
        self,
        function: Callable[Concatenate[Any, P], R],
        *,
        local: bool = False,
        route: Callable[..., Route] | None = None,
        concurrent: bool = False,
    ) -> None:
        self.function = function
        self.local = local
        self.route = route
        self.concurrent = concurrent
        self.name: str = function.__name__
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Endpoint[P, R]: ...
    @overload
    def __get__(self, instance: Role, owner: type) -> BoundEndpoint[P, R]: ...
    def __get__(self, instance: Role | None, owner: type) -> Endpoint[P, R] | BoundEndpoint[P, R]:
        return self if instance is None else BoundEndpoint(self, instance)


@overload
def collective(function: Callable[Concatenate[Any, P], Deferred[R]]) -> Endpoint[P, R]: ...
@overload
def collective(function: Callable[Concatenate[Any, P], R]) -> Endpoint[P, R]: ...
def collective(function: Callable[Concatenate[Any, P], Any]) -> Endpoint[P, Any]:
    """Mark a method that all ranks of the role enter together, in the order of the controller's
    calls.
    """
    return Endpoint(function)


@overload
def local(function: Callable[Concatenate[Any, P], Deferred[R]]) -> Endpoint[P, R]: ...
@overload
def local(function: Callable[Concatenate[Any, P], R]) -> Endpoint[P, R]: ...
def local(function: Callable[Concatenate[Any, P], Any]) -> Endpoint[P, Any]:
    """Mark a method that any one rank may serve."""
    return Endpoint(function, local=True)


def routed(
    route: Callable[..., Route],
) -> Callable[[Callable[Concatenate[Any, P], Deferred[R]]], Endpoint[P, R]]:
    """Mark a method that one shard of the role serves; `route` says which suits a call best.

    The call's value is that of the shard's first rank.
    """

    def mark(function: Callable[Concatenate[Any, P], Any]) -> Endpoint[P, Any]:
        return Endpoint(function, route=route)

    return mark


def concurrent(endpoint: Endpoint[P, R]) -> Endpoint[P, R]:
    """Let an endpoint start while earlier calls are unanswered on its ranks."""
    endpoint.concurrent = True
    return endpoint


def endpoints(role: type[Role]) -> dict[str, Endpoint[Any, Any]]:
    """Return a role's endpoints by name, inherited ones included."""
    return {name: item for name, item in inspect.getmembers(role) if isinstance(item, Endpoint)}


class Signature:
    """An endpoint's parameters and result as the wire carries them: the arguments of a call are one
    tuple, in the order of the parameters.
    """

    def __init__(self, endpoint: Endpoint[Any, Any]) -> None:
        self.where = endpoint.function.__qualname__
        self._function = endpoint.function
        self._signature = inspect.signature(endpoint.function)
        hints = wire_types(endpoint.function, self.where)
        parameters = list(self._signature.parameters.values())[1:]
        self._require_types(parameters, hints)
        self.names = tuple(parameter.name for parameter in parameters)
        self._keyword_only = [
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        ]
        self._take_names = all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
        self._defaults = {
            one.name: one.default for one in parameters if one.default is not one.empty
        }
        self.is_deferred = typing.get_origin(hints["return"]) is Deferred
        if self.is_deferred:
            (hints["return"],) = typing.get_args(hints["return"])
        self.sharded = _sharded(hints)
        self._is_sharded = [name in self.sharded for name in self.names]
        self.scatters = any(self._is_sharded)
        self.gathers = "return" in self.sharded
        if (endpoint.local or endpoint.route) and self.sharded:
            served = "@local: one rank" if endpoint.local else "@routed: one shard"
            raise ConfigError(
                f"{self.where} is {served} serves it, so nothing of it can be Sharded"
            )
        self.result = Codec(hints["return"], functions=False)
        self.arguments = Codec(tuple[tuple(hints[name] for name in self.names)])  # type: ignore[misc]

    def _require_types(self, parameters: list[inspect.Parameter], hints: Mapping[str, Any]) -> None:
        """Raises: ConfigError for a parameter or a result without a type."""
        for parameter in parameters:
            variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if variadic or parameter.name not in hints:
                raise ConfigError(
                    f"{self.where}: parameter '{parameter.name}' needs a name and a type, "
                    "since it crosses to workers"
                )
        if "return" not in hints:
            raise ConfigError(
                f"{self.where} needs a return type, since its result crosses the wire"
            )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments, defaults included. Raises: TypeError as the method itself would."""
        if len(args) == len(self.names) and not kwargs and not self._keyword_only:
            return args
        later, given = self.names[len(args) :], self._defaults | kwargs
        fits = len(args) <= len(self.names) and kwargs.keys() <= {*later} <= given.keys()
        if fits and self._take_names:  # inspect takes five times as long
            return args + tuple(given[name] for name in later)
        bound = self._signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())[1:]

    def method(self, role: Role) -> Callable[..., Any]:
        """Return the endpoint of `role` as a function that takes all arguments by position."""
        method, names = MethodType(self._function, role), self._keyword_only
        if not names:
            return method
        num_positional = len(self.names) - len(names)

        def by_position(*values: Any) -> Any:
            keywords = dict(zip(names, values[num_positional:], strict=True))
            return method(*values[:num_positional], **keywords)

        return by_position

    def scatter(
        self, arguments: tuple[Any, ...], num_shards: int, num_parts: int = 0
    ) -> list[tuple[Any, ...]]:
        """Return the arguments of each shard; see `shard`."""
        columns = []
        for index, is_sharded in enumerate(self._is_sharded):
            value = arguments[index]
            columns.append(
                shard(value, num_shards, num_parts) if is_sharded else [value] * num_shards
            )
        return list(zip(*columns))  # noqa: B905  all have `num_shards` items

    def gather(self, parts: list[Any]) -> Any:
        """Return one result from the results of the shards."""
        return join(parts, self.sharded["return"])


def wire_types(function: Any, where: str) -> dict[str, Any]:
    """Return the types of a function whose values cross between processes.

    Raises: ConfigError when one is not imported where the program runs.
    """
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{where}: {error}: import its types outside of TYPE_CHECKING") from error


def shard(value: Any, num_shards: int, num_parts: int = 0) -> list[Any]:
    """Cut a list, tuple or array into contiguous, nearly equal parts; another class may define
    `shard(n)`. With `num_parts` it is `shard(n, num_parts)`.
    """
    if isinstance(value, _SLICED):
        return [value[part] for part in _slices(len(value), num_shards)]
    if hasattr(value, "shard"):
        parts = list(value.shard(num_shards, *([num_parts] if num_parts else ())))
        if len(parts) != num_shards:
            raise ContractError(
                f"{type(value).__name__}.shard({num_shards}) gave {len(parts)} parts"
            )
        return parts
    raise ContractError(
        f"a {type(value).__name__} cannot be sharded: it is no list or array and has no shard(n)"
    )


@functools.lru_cache(64)
def _slices(length: int, num_shards: int) -> list[slice]:
    size, larger = divmod(length, num_shards)
    ends = [i * size + min(i, larger) for i in range(num_shards + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def join(parts: list[Any], annotation: Any) -> Any:
    """Invert `shard`; another class may define a static method `join(parts)`."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    if isinstance(parts[0], list | tuple):
        joined: list[Any] = []
        for part in parts:
            joined += part
        return joined if isinstance(parts[0], list) else tuple(joined)
    if hasattr(annotation, "join"):
        return annotation.join(parts)
    raise ContractError(
        f"{annotation} results cannot be joined: it is no list or array and has no join(parts)"
    )


def _sharded(hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of what is Sharded, by the names of parameters."""
    return {
        name: typing.get_args(hint)[0]
        for name, hint in hints.items()
        if _SHARDED in getattr(hint, "__metadata__", ())
    }
