"""Facts at the head of the report page: model, data, ranks, machine, versions, command, commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_rl.observe.jsonl import parse_finite_json
from spmd_rl.observe.provenance import PROVENANCE_FILE

Texts = dict[str, str]


def read_provenance(run: Path) -> dict[str, Any]:
    """Return `run.json`, empty without one. Raises: DataError when it does not parse."""
    return _object(run / PROVENANCE_FILE)


def about(run: Path, config: Mapping[str, Any], plan: Any, facts: Mapping[str, Any]) -> Texts:
    """Return the known facts by label. Raises: DataError when contract.json does not parse."""
    contract = _contract(run)
    ranks = plan.get("world_size") if isinstance(plan, dict) else None
    device = contract.get("gpu") or contract.get("device")
    parameters = facts.get("parameters")
    known = {
        "model": config.get("model"),
        "parameters": f"{parameters:,}" if isinstance(parameters, int) else None,
        "data": _data(config.get("data")),
        "reward": config.get("reward"),
        "trainer": _trainer(config.get("trainer")),
        "ranks": ranks,
        "device": device,
        "host": facts.get("host"),
        "machine": facts.get("machine"),
        "torch": contract.get("torch") or facts.get("torch"),
        "spmd-rl": _with_commit(facts),
        "commit": facts.get("commit"),
        "command": facts.get("command"),
    }
    return {label: str(value) for label, value in known.items() if value}


def without_command(known: Texts) -> Texts:
    """Return the facts to compare between runs. The command only repeats their settings."""
    return {label: text for label, text in known.items() if label != "command"}


def _data(data: Any) -> Any:
    """Return the path of the data, or those of a mixture with their weights."""
    if not isinstance(data, Mapping):
        return data
    return ", ".join(f"{path}: {weight}" for path, weight in data.items())


def _trainer(trainer: Any) -> str | None:
    """Return the backend of a trainer, with the layers that it is made of if it names any."""
    backend = trainer.get("backend") if isinstance(trainer, Mapping) else None
    if not isinstance(backend, Mapping) or not backend.get("kind"):
        return None
    kind, layers = backend["kind"], backend.get("layers")
    return f"{kind}, {layers} layers" if layers else str(kind)


def _with_commit(facts: Mapping[str, Any]) -> str:
    """Return the version, with the commit of its source if that is not the user's commit."""
    version, commit = facts.get("spmd_rl", ""), facts.get("spmd_rl_commit")
    return f"{version} ({commit})" if commit and commit != facts.get("commit") else str(version)


def _contract(run: Path) -> dict[str, Any]:
    """Return the numeric contract of the first role, which names its device and torch."""
    for contracts in _object(run / "contract.json").values():
        for contract in contracts if isinstance(contracts, list) else ():
            if isinstance(contract, dict) and isinstance(contract.get("facts"), dict):
                return dict(contract["facts"])
    return {}


def _object(path: Path) -> dict[str, Any]:
    found = parse_finite_json(str(path), path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}
