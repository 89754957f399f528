"""Settings of `spmd-rl eval` from those of a run: its prompts, reward, sampling and trainer.

The weights are those of the newest checkpoint, unless a model or a checkpoint is named.

The file may be that of another recipe. Then the sets are those of its `eval`, whose settings go
before the run's, as in the evaluations of the run itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from spmd_rl.config.load import read_toml
from spmd_rl.controller.run.recipe import load_recipe, shipped_recipes
from spmd_rl.train.checkpoint.saved_run import checkpoint_of, has_begun

# where roles are, how large a step is and where results go is a matter of each command
OF_EACH_RUN = ("split", "offload", "run", "data")
OF_RUN = ("exact", "row_shards")  # but for these, which choose bits
# of the prompts of pairs
OF_PAIRS = ("chosen_key", "rejected_key")


def settings_of_run(
    table: dict[str, Any], own: Collection[str], given: Mapping[str, str], file: Path | None
) -> dict[str, Any]:
    """Return the settings of an evaluation from the table of a file, perhaps another recipe's.

    `own` are the keys of an evaluation, and `given` what the command line says. The trainer of a
    checkpoint is that of its run, if the file does not say it. A key that belongs to no recipe is
    printed. Raises: ConfigError where `file` is that of a run, which has no checkpoint yet.
    """
    if _is_of_recipe(table, own):
        table = _of_recipe(table, own)
        is_run = file is not None and "trainer" in table and has_begun(file.parent)
        if file is not None and is_run and not {"model", "checkpoint"} & given.keys():
            table["checkpoint"] = str(checkpoint_of(file.parent, None))
    if any(key == "data" or key.startswith("sets.") for key in given):
        table = {key: value for key, value in table.items() if key not in ("data", "sets")}
    if checkpoint := given.get("checkpoint", table.get("checkpoint", "")):
        run = Path(checkpoint).parent.parent / "config.toml"
        saved = read_toml(run) if run.is_file() else {}
        known = {key: saved[key] for key in ("model", "trainer") if key in saved}
        table = known | table
    if "trainer" in table:
        table |= {"trainer": _to_load(table["trainer"])}
    return table


def _is_of_recipe(table: Mapping[str, Any], own: Collection[str]) -> bool:
    others = table.keys() - own
    return bool(others) and not others.isdisjoint(_keys_of_recipes())


def _of_recipe(table: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return what an evaluation takes from the table of another recipe."""
    if unknown := sorted(table.keys() - own - _keys_of_recipes()):
        print(f"an evaluation does not use {', '.join(unknown)}", flush=True)
    found = {key: table[key] for key in table if key in own and key not in OF_EACH_RUN}
    evaluation = dict(table.get("eval", {}))
    prompts = _merged(table.get("prompts", {}), evaluation.get("prompts", {}))
    found["prompts"] = {key: prompts[key] for key in prompts if key not in OF_PAIRS}
    sampling = _merged(table.get("sampling", {}), evaluation.get("sampling", {}))
    found["sampling"] = sampling | {"num_samples": evaluation.get("num_samples", 1)}
    found |= {key: evaluation[key] for key in ("sets", "seed", "threshold") if key in evaluation}
    for key in ("data", "reward"):
        if evaluation.get(key):
            found[key] = evaluation[key]
    if kept := {key: table["run"][key] for key in OF_RUN if key in table.get("run", {})}:
        found["run"] = kept
    return found


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with those of another in it; of tables in both, all keys."""
    both = {
        key: _merged(base[key], changes[key])
        for key in changes
        if isinstance(base.get(key), Mapping) and isinstance(changes[key], Mapping)
    }
    return {**base, **changes, **both}


def _to_load(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which a trainer is made to load a checkpoint.

    Only adapters need the first weights, which are those of their base.
    """
    lora = {key: value for key, value in trainer.get("lora", {}).items() if key != "folder"}
    init = trainer.get("init", "folder") if lora.get("rank") else "random"
    return dict(trainer) | {"lora": lora, "init": init}


def _keys_of_recipes() -> set[str]:
    """Return the keys of all shipped recipes."""
    configs = [load_recipe(name).config for name in shipped_recipes()]
    return {field.name for config in configs for field in fields(config)}
