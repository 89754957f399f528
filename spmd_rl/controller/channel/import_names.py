"""Names of functions and classes, "module:qualname", by which another process imports them."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import msgspec

from spmd_rl.errors import ContractError


class FunctionRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function by name, and the keyword arguments bound to it."""

    function: str
    kwargs: dict[str, Any]


def name_of(item: Callable[..., Any] | type) -> str:
    """Return "module:qualname" of a function or class.

    Raises: ContractError when another process could not import it by that name.
    """
    module, qualname = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if module is None or qualname is None or module == "__main__" or "<" in qualname:
        raise ContractError(
            f"{qualname or item!r} cannot cross between processes: define it at the top of a module"
        )
    return f"{module}:{qualname}"


def resolve(name: str) -> Any:
    """Import and return the object that "module:qualname" names.

    Raises: ContractError when there is none.
    """
    module, _, qualname = name.partition(":")
    try:
        item: Any = importlib.import_module(module)
        for part in qualname.split("."):
            item = getattr(item, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ContractError(f"'{name}' cannot be imported here: {error}") from error
    return item


def reference_to(function: Callable[..., Any]) -> FunctionRef:
    """Return a reference to a function or class, or to a `partial` of one by keywords.

    Raises: ContractError when another process could not import it.
    """
    if isinstance(function, functools.partial):
        if function.args:
            raise ContractError(
                f"the arguments of {function.func.__name__} cannot cross by position: "
                "bind them by keyword"
            )
        return FunctionRef(name_of(function.func), function.keywords)
    if not isinstance(function, types.FunctionType | type):
        raise ContractError(
            f"a {type(function).__qualname__} cannot cross between processes: pass a function"
        )
    return FunctionRef(name_of(function), {})


def resolve_reference(reference: FunctionRef) -> Any:
    """Import the function that `reference` names, and bind its keyword arguments.

    Raises: ContractError when there is none.
    """
    function = resolve(reference.function)
    return functools.partial(function, **reference.kwargs) if reference.kwargs else function
