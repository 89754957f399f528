"""RequestFields of a request: each is read, ignored by name, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.logs.form import Json, check
from spmd_rl.errors import DataError
from spmd_rl.gateway.dialects.asked import OwnSampling, Refused, SamplingRules
from spmd_rl.gateway.follow_template import TemplateExtras
from spmd_rl.types.samples import MODEL

MAX_STOPS, MAX_STOP = 64, 256  # number of stops, and characters of one
END_OF_IDS = 1 << 31
END_OF_SEEDS = 1 << 63


def read_body(body: bytes) -> Json:
    """Return the object of a body. Raises: Refused."""
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise Refused("", f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused("", f"the body is not an object but {type(found).__name__}")
    return found


class RequestFields:
    """RequestFields of a body, each of which is taken once. What is left over is refused."""

    def __init__(self, body: Json) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._ignored: list[str] = []

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a field of this type. Raises: Refused."""
        value = self._left.pop(name, default)
        if value is default:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(_NAMES.get(one, one.__name__) for one in kinds)
            raise Refused(name, f"expected {names}, got {_shown(value)}")
        return value

    def number(self, name: str) -> int | None:
        """Return a whole number of at least 1. Raises: Refused."""
        value: int | None = self.take(name, int)
        if value is not None and not 1 <= value < END_OF_IDS:
            raise Refused(name, f"expected 1 or more, got {value}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a text or a list of texts, none of which is empty. Raises: Refused."""
        value = self.take(name, (str, list), [])
        found = [value] if isinstance(value, str) else value
        if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in found):
            raise Refused(name, f"expected texts of 1 to {MAX_STOP} characters")
        if len(found) > MAX_STOPS:
            raise Refused(name, f"expected at most {MAX_STOPS} texts, got {len(found)}")
        return tuple(found)

    def ids(self, name: str) -> NDArray[np.int32]:
        """Return a list of token ids as an array. Shape: [T]. Raises: Refused."""
        found = self.take(name, list, [])
        if not found:
            return np.zeros(0, np.int32)
        try:
            ids = np.array(found)
        except ValueError as error:  # lists of other lengths in it
            raise Refused(name, "expected token ids") from error
        if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= END_OF_IDS:
            raise Refused(name, "expected token ids")
        return ids.astype(np.int32)

    def only(self, name: str, *allowed: Any, because: str = "this gateway does not do it") -> None:
        """Take a field whose value changes nothing. Raises: Refused for another value."""
        value = self._left.pop(name, None)
        if value is not None and not any(value == one for one in allowed):
            known = " or ".join(map(_shown, allowed)) or "no value"
            raise Refused(name, f"expected {known}, got {_shown(value)}: {because}")

    def sampling(self, rules: SamplingRules) -> OwnSampling:
        """Take the fields of sampling, and return those that the client may choose.

        Raises: Refused for a value that is not the recipe's, unless the rules are free.
        """
        if rules.free:
            return self._own_sampling()
        for name in ("temperature", "top_p", "top_k", "min_p"):
            value = self.take(name, (int, float))
            ours = getattr(rules, name)
            off = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}.get(name, ())
            if value is None or (ours is not None and math.isclose(value, ours, rel_tol=1e-6)):
                continue
            if value in off and ours in (*off, None):
                continue
            raise Refused(
                name,
                f"got {value:g}, but log-probs are those of the recipe's sampling.{name}"
                + (f" = {ours:g}" if ours is not None else "")
                + ": leave it out, or set the recipe",
            )
        return OwnSampling()

    def _own_sampling(self) -> OwnSampling:
        numbers = {
            name: self.take(name, (int, float)) for name in ("temperature", "top_p", "min_p")
        }
        top_k, seed = self.take("top_k", int), self.take("seed", int)
        if seed is not None and not 0 <= seed < END_OF_SEEDS:
            raise Refused("seed", f"expected 0 to {END_OF_SEEDS - 1}, got {seed}")
        top_k, priority = 0 if top_k == -1 else top_k, self.take("priority", int, 0)
        return OwnSampling(**numbers, top_k=top_k, seed=seed, priority=priority)

    def ignore(self, *names: str) -> None:
        """Take fields that say nothing about the reply. The answer names them in a header."""
        self._ignored += [name for name in names if self._left.pop(name, None) is not None]

    def finish(self) -> tuple[str, ...]:
        """Return the names of what was ignored. Raises: Refused for a field that nobody took."""
        if self._left:
            raise Refused(sorted(self._left)[0], "this gateway does not know the field")
        return tuple(self._ignored)


_NAMES = {str: "a text", int: "a whole number", float: "a number", list: "a list", bool: "a truth "
          "value", dict: "an object"}  # fmt: skip


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


def read_messages(read: Callable[[Json], Json], body: Json) -> Json:
    """Return `messages` and `tools` of a body in our form, by a reader of `data/logs`.

    Raises: Refused that names the field.
    """
    try:
        row = read(body)
        check(row)
        msgspec.json.encode([row["messages"], row.get("tools")])  # half of a surrogate pair
    except DataError as error:
        field = error.where.strip(".: ")
        raise Refused(field, str(error).removeprefix(error.where).lstrip(": ")) from error
    except (AttributeError, TypeError, KeyError) as error:  # a value of another type
        raise Refused("messages", f"not in the form of this endpoint: {error}") from error
    except (ValueError, RecursionError) as error:
        raise Refused("messages", f"this is no text: {error}") from error
    if row["messages"][-1]["role"] == MODEL:
        raise Refused("messages", "the last message is the assistant's: nothing is left to say")
    return row


def extras_of(row: Json, template_kwargs: Json) -> TemplateExtras:
    """Return what the template shows besides messages."""
    return TemplateExtras(list(row.get("tools") or []), template_kwargs)
