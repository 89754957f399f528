"""Numeric contracts: the facts that ranks and roles must share to compute the same bits.

The ranks of a role are compared when it is built, and both ends of a link when it is made. The link
reads the contracts again, because one role may set something for its whole process that changes the
contract of the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_rl.errors import ContractError
from spmd_rl.observe.atomic_write import write_atomically
from spmd_rl.observe.jsonl import read_object

Contract = dict[str, str | int]

CONTRACT_FILE = "contract.json"  # in the run's folder: the contracts of each role and link
UNPROMISED = ("no promise", "not compared")  # words in a fact that promises no equal bits


def record_contracts(
    folder: Path, name: str, contracts: Mapping[str, Contract], exact: bool
) -> None:
    """Write the contracts of the role or link `name` to the run's folder.

    Raises: ContractError if they must be `exact` and differ; DataError for a file that is damaged.
    """
    if exact and (clause := disagreement(contracts)):
        raise ContractError(
            f"{clause} (give both the same settings; run.exact = false lets them differ)"
        )
    path = folder / CONTRACT_FILE
    recorded = read_object(path) if path.exists() else {}
    recorded[name] = by_digest(contracts)
    write_atomically(path, json.dumps(recorded, indent=1) + "\n")


def disagreement(contracts: Mapping[str, Contract]) -> str:
    """Return a clause that says how the first two different contracts differ; empty if none do."""
    items = iter(contracts.items())
    first, expected = next(items, ("", {}))
    for name, contract in items:
        keys = [key for key in {**expected, **contract} if expected.get(key) != contract.get(key)]
        if keys:
            facts = "; ".join(
                f"{key} is {expected.get(key)!r} in the first "
                f"and {contract.get(key)!r} in the second"
                for key in keys
            )
            return f"{first} and {name} follow different numeric contracts: {facts}"
    return ""


def not_promised(contracts: Mapping[str, Contract]) -> str:
    """Return a clause of the facts that promise no equal bits, or whose promise was not tested."""
    facts = {
        (key, str(value)) for contract in contracts.values() for key, value in contract.items()
    }
    return "; ".join(
        f"{key} is {value!r}"
        for key, value in sorted(facts)
        if any(words in value for words in UNPROMISED)
    )


def by_digest(contracts: Mapping[str, Contract]) -> list[dict[str, Any]]:
    """Return each different contract: its digest, the names of those who follow it, its facts."""
    groups: dict[str, dict[str, Any]] = {}
    for name, facts in contracts.items():
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        group = groups.setdefault(digest, {"digest": digest, "by": [], "facts": facts})
        group["by"].append(name)
    return list(groups.values())
