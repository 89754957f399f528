"""Numeric contracts: what ranks and roles must share to have the same bits, compared where they
first meet.

A role that has one (`numeric_contract`) says it when it is built, and its ranks are held to each
other. Both ends of a link say theirs once more when it is made: what one role sets for its process
may change what the other follows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_rl.errors import ContractError
from spmd_rl.observe.atomic_write import write_atomically

Contract = dict[str, str | int]

FILE = "contract.json"  # in the run's folder: what is followed, by role and by link
WEAK = ("no promise", "not compared")  # in a fact of a contract


def agree(folder: Path, name: str, parties: Mapping[str, Contract], exact: bool) -> None:
    """Keep what the parties of a role or a link follow.

    Raises: ContractError if they must be `exact` and could not have the same bits.
    """
    if exact and (clause := disagreement(parties)):
        raise ContractError(f"{clause} (run.exact = false lets them)")
    path = folder / FILE
    kept = json.loads(path.read_text()) if path.exists() else {}
    write_atomically(path, json.dumps(kept | {name: followed(parties)}, indent=1) + "\n")


def disagreement(contracts: Mapping[str, Contract]) -> str:
    """How the numeric contracts of named parties differ, as a clause; empty when all are the same."""
    parties = iter(contracts.items())
    first, expected = next(parties, ("", {}))
    for name, contract in parties:
        keys = [key for key in {**expected, **contract} if expected.get(key) != contract.get(key)]
        if keys:
            values = [(key, expected.get(key), contract.get(key)) for key in keys]
            facts = "; ".join(
                f"{key} is {one!r} in the first and {other!r} in the second"
                for key, one, other in values
            )
            return f"{first} and {name} follow different numeric contracts: {facts}"
    return ""


def not_promised(contracts: Mapping[str, Contract]) -> str:
    """Where a contract of equal bits promises none, or was not seen to keep it, as a clause; empty
    where all holds.
    """
    facts = {
        (key, str(value)) for contract in contracts.values() for key, value in contract.items()
    }
    return "; ".join(
        f"{key} is {value!r}" for key, value in sorted(facts) if any(weak in value for weak in WEAK)
    )


def followed(contracts: Mapping[str, Contract]) -> list[dict[str, Any]]:
    """Each contract that is followed: its digest, by whom, and its facts."""
    found: dict[str, dict[str, Any]] = {}
    for name, facts in contracts.items():
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        found.setdefault(digest, {"digest": digest, "by": [], "facts": facts})["by"].append(name)
    return list(found.values())
