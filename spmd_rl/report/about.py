"""Facts at the head of the report page: model, data, ranks, machine, versions, command, commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_rl.model.foreign.names import NOT_COMPARED, is_foreign
from spmd_rl.observe.jsonl import parse_finite_json
from spmd_rl.observe.provenance import PROVENANCE_FILE

Texts = dict[str, str]


def read_provenance(run: Path) -> dict[str, Any]:
    """Return `run.json`, empty without one. Raises: DataError when it does not parse."""
    return _object(run / PROVENANCE_FILE)


def about(run: Path, config: Mapping[str, Any], plan: Any, facts: Mapping[str, Any]) -> Texts:
    """Return the known facts by label, from settings by dotted key.

    Raises: DataError when contract.json does not parse.
    """
    contract = _contract(run)
    ranks = plan.get("world_size") if isinstance(plan, dict) else None
    device = contract.get("gpu") or contract.get("device")
    parameters = facts.get("parameters")
    known = {
        "ended early": facts.get("early_end"),
        "model": config.get("model"),
        "bits": NOT_COMPARED if is_foreign(str(config.get("model"))) else None,
        "parameters": f"{parameters:,}" if isinstance(parameters, int) else None,
        "trained": _trained(facts.get("trained_parameters"), config),
        "data": _one_or_table(config, "data"),
        "reward": _one_or_table(config, "reward"),
        "trainer": _trainer(config),
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


def _trained(trained: Any, config: Mapping[str, Any]) -> str | None:
    """Return the number of parameters that learn if not all do, with the rank of adapters."""
    rank = config.get("trainer.lora.rank")
    number = f"{trained:,} parameters" if isinstance(trained, int) else ""
    adapters = f"LoRA of rank {rank}" if rank else ""
    return ", ".join(filter(None, [number, adapters])) or None


def _one_or_table(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a setting, or the entries of its table, such as files with weights."""
    table = {name: value for name, value in config.items() if name.startswith(f"{key}.")}
    listed = ", ".join(f"{name.removeprefix(f'{key}.')}: {value}" for name, value in table.items())
    return config.get(key) or listed


def _trainer(config: Mapping[str, Any]) -> str | None:
    """Return the backend of a trainer, with the layers that it is made of if it names any."""
    kind, layers = (config.get(f"trainer.backend.{name}") for name in ("kind", "layers"))
    return f"{kind}, {layers} layers" if kind and layers else kind


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
