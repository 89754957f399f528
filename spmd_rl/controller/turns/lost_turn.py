"""LostTurnError: what ends the turns of several ranks, one of which is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Given = TypeVar("Given")
Told = TypeVar("Told")


class LostTurnError(Exception):
    """A rank could not be asked, most likely because it is gone; its cause says more."""


def asked(exchange: Callable[[Given], Told], given: Given) -> Told:
    """Return what the ranks of a turn tell each other by `exchange`, a collective.

    Raises: LostTurnError.
    """
    try:
        return exchange(given)
    except RuntimeError as error:  # as collectives raise it
        raise LostTurnError(str(error)) from error
