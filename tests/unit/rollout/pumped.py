"""Calls of a role in this process, pumped until they are answered, as its worker would."""

from __future__ import annotations

import select
from typing import Any


def answer_of(role: Any, deferred: Any) -> Any:
    """Return the value of a deferred call, or raise its error."""
    while not deferred.is_answered:
        if not role.has_work():
            watched = role.watched()
            assert watched, "the call would never be answered"
            select.select(watched, [], [], 0.25)
        role.pump()
    if deferred.error is not None:
        raise deferred.error
    return deferred.value


def generated(role: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what `generate` answers."""
    return answer_of(role, role.generate(*args, **kwargs))
